"""Refusals of files that `check`, `plan` and `memory` do not read.

A refusal is one sentence, which says whose file it looks like:

    refuse_framework(document)           # "a.py: looks like Automodel (it imports `nemo_automodel`), which ..."
    refuse_sections(sections, path)      # "a.yaml: must have the sections of a run, ..., got 'foo'. ..."
    no_run_of_megatron(path, launches)   # "a.sh: must start a run of Megatron-LM, got 'train.py'. ..."

The signs of frameworks are in `bridge.read.framework_signs`, and those of the systems that `convert`
reads in `bridge.read.system_signs`.
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
NO_RUN = (
    "{path}: must have the sections of a run, such as model and mixed_precision, got {keys}. "
    "Give a run's file of Precision Bridge, Megatron Bridge or Megatron-LM."
)
OVERRIDES = (
    "{path}: must be the file of a whole run, got overrides of Megatron Bridge, which are a part of one ({names}). "
    "Give the script that starts the run with them, or the run's saved configuration."
)
PARTS_OF_BRIDGE = frozenset(
    {
        "comm_overlap",
        "dataset",
        "dist",
        "ft",
        "inprocess_restart",
        "logger",
        "nvrx_straggler",
        "peft",
        "profiling",
        "rerun_state_machine",
        "rng",
        "scheduler",
        "straggler",
        "tensor_inspect",
        "tokenizer",
        "validation",
    }
)
"""Sections of Megatron Bridge's ConfigContainer that a run of ours has not (0.6.2 training/config.py)."""
MIN_PARTS = 2
"""Sections from which on a file is one of overrides; a single one may be a misspelt key of ours."""
OTHER_LAUNCHES = (
    "{path}: must start a run of Megatron-LM, got {programs!r:.80}. "
    "Give its launch script, or the configuration that this one starts with."
)
MIN_CERTAINTY = 0.5
"""The certainty from which on a system is named."""
SHOWN_KEYS = 4
"""Keys that a refusal names; the others are counted."""


def refuse_framework(document: Document) -> None:
    """Refuse the file of a framework that is not read, a Python program, and TOML.

    Raises:
        UnreadFileError: The document is one of these.
    """
    try:
        framework = framework_signs.recognise_file(document)
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None
    if framework is not None:
        sentence = framework.refusal(document.path)
        raise UnreadFileError(sentence, kind=f"looks like {framework.name}")
    if document.kind == "python":
        _refuse_system(document)
        raise UnreadFileError(PROGRAM.format(path=document.path), kind="a Python program")
    if document.kind == "toml":
        _refuse_no_run(document)
        raise UnreadFileError(TOML.format(path=document.path), kind="TOML")


def refuse_sections(sections: Mapping[Any, Any], path: Path) -> None:
    """Refuse sections of another framework, or of none; a misspelt key is left to the check of the sections.

    Raises:
        UnreadFileError: The sections are not those of a run.
    """
    document = Document(path=str(path), text="", kind="yaml", of=sections)
    refuse_framework(document)
    _refuse_no_run(document)


def _refuse_no_run(document: Document) -> None:
    """Refuse a mapping whose keys, or whose fields, are not those of a run."""
    _refuse_system(document)
    keys: list[str] = []
    for key in map(str, document.mapping):
        if not key.startswith("_"):  # `_target_` is refused by itself
            keys.append(key)
    unknown = [key for key in keys if key not in KEYS]
    names_classes = any(framework_signs.classes_in(document.mapping))  # refused by themselves
    if len(unknown) >= MIN_PARTS and PARTS_OF_BRIDGE.issuperset(unknown) and not names_classes:
        sentence = OVERRIDES.format(path=document.path, names=", ".join(unknown))
        raise UnreadFileError(sentence, kind="looks like overrides of Megatron Bridge")
    foreign = [key for key in unknown if not near_names(key, KEYS)]
    known_count = len(keys) - len(unknown)
    if len(foreign) > known_count:
        raise _no_run(document.path, unknown)
    fields = _fields_in(document.mapping)
    is_run = any(_is_field_of_a_run(section, name) for section, name in fields)
    if unknown == foreign and fields and not is_run and not names_classes:
        dotted = [f"{section}.{name}" for section, name in fields]
        raise _no_run(document.path, [*unknown, *dotted])


def _fields_in(sections: Mapping[Any, Any]) -> list[tuple[str, str]]:
    """Return section and name of each field in the sections of a run."""
    fields: list[tuple[str, str]] = []
    for section in (*OWNERS, *SECTIONS):
        values = sections.get(section)
        if isinstance(values, Mapping):
            fields += [(section, str(name)) for name in values]
    return fields


def _is_field_of_a_run(section: str, name: str) -> bool:
    """Return whether a section has a field of this name, or of a near one."""
    fields = fields_of(section)
    return name in fields or bool(near_names(name, fields))


def _no_run(path: str, unknown: Sequence[str]) -> UnreadFileError:
    """Return the refusal of a file with unknown keys."""
    keys = ", ".join(repr(key) for key in unknown[:SHOWN_KEYS])
    if len(unknown) > SHOWN_KEYS:
        keys += f" and {len(unknown) - SHOWN_KEYS} more"
    return UnreadFileError(NO_RUN.format(path=path, keys=keys), kind="no sections of a run")


def _refuse_system(document: Document) -> None:
    """Refuse the file of a system that `convert` reads."""
    from bridge.read.system_signs import candidates  # imports the modules of every system

    for candidate in candidates(document)[:1]:
        if candidate.certainty >= MIN_CERTAINTY:
            sentence = CONVERTED.format(
                path=document.path,
                quoted=quote(document.path),
                title=candidate.title,
                evidence=candidate.evidence,
            )
            raise UnreadFileError(sentence, kind=f"looks like a file of {candidate.title}")


def no_run_of_megatron(path: str, launches: Sequence[Launch]) -> UnreadFileError:
    """Return the refusal of a launch script that starts no run of Megatron-LM."""
    framework = framework_signs.recognise_first(launches)
    if framework is not None:
        return UnreadFileError(framework.refusal(path), kind=f"looks like {framework.name}")
    names = [launch.name for launch in launches if launch.line]
    programs = ", ".join(dict.fromkeys(names)) or "no program"
    sentence = OTHER_LAUNCHES.format(path=path, programs=programs)
    return UnreadFileError(sentence, kind="starts no run of Megatron-LM")
