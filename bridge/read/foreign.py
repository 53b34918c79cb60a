"""Files that `check`, `plan` and `memory` do not read: refused in one sentence, which says whose they look like.

A framework that no command reads has a row in `bridge.read.framework_signs`; `convert` reads those of the systems in
`bridge.read.systems`. Both are asked here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shlex import quote
from typing import TYPE_CHECKING, Any

from bridge.errors import PayloadError, UnreadFileError
from bridge.read import framework_signs
from bridge.read.keys import KEYS, OWNERS, SECTIONS, fields_of
from bridge.read.text.document import Document
from bridge.rules.facts.near_names import near_names

if TYPE_CHECKING:
    from pathlib import Path

    from bridge.read.launch.launches import Launch

CONVERTED = (
    "{path}: looks like a file of {title} (it {evidence}), and `check`, `plan` and `memory` do not read this form of "
    "it. `precision-bridge convert {quoted}` reads what it states of the precision."
)
PROGRAM = "{path}: must be a run's file, got a Python program. Give the launch script or the configuration of the run."
TOML = "{path}: must be a run's file, got TOML. Write it as YAML."
RUNS = "Give a run's file of Precision Bridge, Megatron Bridge or Megatron-LM."
CERTAIN = 0.5
"""The least certainty with which a system is named."""
SHOWN = 4
"""Sections that a refusal names; the others are counted."""


def refuse_framework(document: Document) -> None:
    """Raise UnreadFileError for a file of a framework that is not read, and for a Python program."""
    try:
        found = framework_signs.recognise_file(document)
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None
    if found is not None:
        raise UnreadFileError(found.refusal(document.path), kind=f"looks like {found.name}")
    if document.kind == "python":
        _refuse_system(document)
        raise UnreadFileError(PROGRAM.format(path=document.path), kind="a Python program")
    if document.kind == "toml":
        _refuse_no_run(document)
        raise UnreadFileError(TOML.format(path=document.path), kind="TOML")


def refuse_sections(sections: Mapping[Any, Any], path: Path) -> None:
    """Raise UnreadFileError for sections of another framework, or of none; a misspelt one is left to others."""
    document = Document(path=str(path), text="", kind="yaml", of=sections)
    refuse_framework(document)
    _refuse_no_run(document)


def _refuse_no_run(document: Document) -> None:
    _refuse_system(document)
    named = [
        str(key) for key in document.mapping if not str(key).startswith("_")
    ]  # `_target_` is refused by itself
    unknown = [key for key in named if key not in KEYS]
    foreign = [key for key in unknown if not near_names(key, KEYS)]
    if len(foreign) > len(named) - len(unknown):
        raise _no_run(document.path, unknown)
    fields = _fields_in(document.mapping)
    is_known = any(
        name in fields_of(key) or near_names(name, fields_of(key)) for key, name in fields
    )
    if unknown == foreign and fields and not is_known and not _has_classes(document):
        raise _no_run(document.path, [*unknown, *(f"{key}.{name}" for key, name in fields)])


def _fields_in(sections: Mapping[Any, Any]) -> list[tuple[str, str]]:
    """Return section and name of each field in the sections of a run."""
    held = ((key, sections.get(key)) for key in (*OWNERS, *SECTIONS))
    return [
        (key, str(name)) for key, fields in held if isinstance(fields, Mapping) for name in fields
    ]


def _has_classes(document: Document) -> bool:
    """Return whether a class is named, which is refused by itself."""
    return bool(list(framework_signs.classes_in(document.mapping)))


def _no_run(path: str, unknown: Sequence[str]) -> UnreadFileError:
    named = ", ".join(repr(key) for key in unknown[:SHOWN])
    more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
    rule = "must have the sections of a run, such as model and mixed_precision"
    return UnreadFileError(
        f"{path}: {rule}, got {named}{more}. {RUNS}", kind="no sections of a run"
    )


def _refuse_system(document: Document) -> None:
    from bridge.read.systems import candidates  # imports every system

    for system, seen in candidates(document)[:1]:
        if seen.certainty >= CERTAIN:
            sentence = CONVERTED.format(
                path=document.path,
                quoted=quote(document.path),
                title=system.title,
                evidence=seen.evidence,
            )
            raise UnreadFileError(sentence, kind=f"looks like a file of {system.title}")


def no_run_of_megatron(path: str, started: Sequence[Launch]) -> UnreadFileError:
    """Return the refusal of a launch script that starts no run of Megatron-LM."""
    found = framework_signs.recognise_first(started)
    if found is not None:
        return UnreadFileError(found.refusal(path), kind=f"looks like {found.name}")
    names = (
        ", ".join(dict.fromkeys(launch.name for launch in started if launch.line)) or "no program"
    )
    rule = "must start a run of Megatron-LM"
    remedy = "Give its launch script, or the configuration that this one starts with."
    return UnreadFileError(
        f"{path}: {rule}, got {names!r:.80}. {remedy}", kind="starts no run of Megatron-LM"
    )
