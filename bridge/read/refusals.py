"""Refusals of files that `check`, `plan` and `memory` do not read.

A refusal is one sentence, which names the system that the file looks like:

    refuse_framework(document)
    # "a.py: looks like Automodel (it imports `nemo_automodel`), which ..."
    refuse_sections(sections, path)
    # "a.yaml: must have the sections of a run, ..., got 'foo'. ..."
    make_no_megatron_run_error(path, launches)
    # "a.sh: must start a run of Megatron-LM, got 'train.py'. ..."

The signs of frameworks are in `bridge.read.framework_signs`, and those of the systems that
`convert` reads in `bridge.read.foreign_system_signs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shlex import quote
from typing import TYPE_CHECKING, Any

from bridge.errors import PayloadError, UnreadFileError
from bridge.read import framework_signs
from bridge.read.run_keys import (
    OWNER_SECTIONS,
    RUN_CONFIG_KEYS,
    SECTION_CLASSES,
    get_section_fields,
)
from bridge.read.text.document import Document
from bridge.rules.facts.near_names import find_near_names

if TYPE_CHECKING:
    from pathlib import Path

    from bridge.read.launch.launch import Launch

CONVERTIBLE_MESSAGE = (
    "{path}: looks like a file of {title} (it {evidence}), and `check`, `plan` and `memory` do not read this form of "
    "it. `precision-bridge convert {quoted}` reads what it states of the precision."
)
PYTHON_PROGRAM_MESSAGE = (
    "{path}: must be a run's file, got a Python program. "
    "Give the launch script or the configuration of the run."
)
TOML_MESSAGE = "{path}: must be a run's file, got TOML. Write it as YAML."
NO_RUN_MESSAGE = (
    "{path}: must have the sections of a run, such as model and mixed_precision, got {keys}. "
    "Give a run's file of Precision Bridge, Megatron Bridge or Megatron-LM."
)
OVERRIDES_MESSAGE = (
    "{path}: must be the file of a whole run, got overrides of Megatron Bridge, which are a part of one ({names}). "
    "Give the script that starts the run with them, or the run's saved configuration."
)
MEGATRON_BRIDGE_SECTIONS = frozenset(
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
"""Sections of Megatron Bridge's ConfigContainer that a run of ours does not have.

Source: Megatron Bridge 0.6.2 training/config.py."""
MIN_BRIDGE_SECTIONS = 2
"""Such sections by which a file is taken for overrides of Megatron Bridge. A single one may be a
misspelt key of ours."""
OTHER_LAUNCHES_MESSAGE = (
    "{path}: must start a run of Megatron-LM, got {programs!r:.80}. "
    "Give its launch script, or the configuration that this one starts with."
)
MIN_CERTAINTY = 0.5
"""The least certainty with which a system is named."""
MAX_SHOWN_KEYS = 4
"""Keys that a refusal names. Further keys are counted."""


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
        _refuse_convertible_file(document)
        raise UnreadFileError(
            PYTHON_PROGRAM_MESSAGE.format(path=document.path), kind="a Python program"
        )
    if document.kind == "toml":
        _require_run_keys(document)
        raise UnreadFileError(TOML_MESSAGE.format(path=document.path), kind="TOML")


def refuse_sections(sections: Mapping[Any, Any], path: Path) -> None:
    """Refuse sections that are not those of a run.

    A misspelt key is not refused here: the check of the sections names the right one.

    Raises:
        UnreadFileError: The sections are not those of a run.
    """
    document = Document(path=str(path), text="", kind="yaml", of=sections)
    refuse_framework(document)
    _require_run_keys(document)


def _require_run_keys(document: Document) -> None:
    """Refuse a mapping whose keys, or whose fields, are not those of a run.

    The name of a class (`_target_`) has a refusal of its own in the check of the sections. So a
    mapping with one is not refused for its fields.

    Raises:
        UnreadFileError: The keys or fields are not those of a run.
    """
    _refuse_convertible_file(document)
    keys = [str(key) for key in document.mapping if not str(key).startswith("_")]
    unknown = [key for key in keys if key not in RUN_CONFIG_KEYS]
    names_classes = any(framework_signs.list_class_paths(document.mapping))
    is_of_bridge = len(unknown) >= MIN_BRIDGE_SECTIONS and MEGATRON_BRIDGE_SECTIONS.issuperset(
        unknown
    )
    if is_of_bridge and not names_classes:
        sentence = OVERRIDES_MESSAGE.format(path=document.path, names=", ".join(unknown))
        raise UnreadFileError(sentence, kind="looks like overrides of Megatron Bridge")
    foreign = [key for key in unknown if not find_near_names(key, RUN_CONFIG_KEYS)]
    known_count = len(keys) - len(unknown)
    if len(foreign) > known_count:
        raise _make_no_run_error(document.path, unknown)
    fields = _list_fields(document.mapping)
    has_run_field = any(_is_run_field(section, name) for section, name in fields)
    has_misspelt_key = unknown != foreign
    if fields and not (has_misspelt_key or has_run_field or names_classes):
        dotted = [f"{section}.{name}" for section, name in fields]
        raise _make_no_run_error(document.path, [*unknown, *dotted])


def _list_fields(sections: Mapping[Any, Any]) -> list[tuple[str, str]]:
    """Return the section and the name of each field in the sections of a run."""
    fields: list[tuple[str, str]] = []
    for section in (*OWNER_SECTIONS, *SECTION_CLASSES):
        values = sections.get(section)
        if isinstance(values, Mapping):
            fields += [(section, str(name)) for name in values]
    return fields


def _is_run_field(section: str, name: str) -> bool:
    """Return whether a section can have a field of this name, or of a similar one."""
    fields = get_section_fields(section)
    return name in fields or bool(find_near_names(name, fields))


def _make_no_run_error(path: str, unknown: Sequence[str]) -> UnreadFileError:
    """Return the refusal of a file with unknown keys."""
    keys = ", ".join(repr(key) for key in unknown[:MAX_SHOWN_KEYS])
    if len(unknown) > MAX_SHOWN_KEYS:
        keys += f" and {len(unknown) - MAX_SHOWN_KEYS} more"
    return UnreadFileError(NO_RUN_MESSAGE.format(path=path, keys=keys), kind="no sections of a run")


def _refuse_convertible_file(document: Document) -> None:
    """Refuse the file of a system that `convert` reads.

    Raises:
        UnreadFileError: The file is most probably of such a system.
    """
    from bridge.read.foreign_system_signs import (
        list_candidates,  # imports the modules of every system
    )

    for candidate in list_candidates(document)[:1]:
        if candidate.certainty >= MIN_CERTAINTY:
            sentence = CONVERTIBLE_MESSAGE.format(
                path=document.path,
                quoted=quote(document.path),
                title=candidate.title,
                evidence=candidate.evidence,
            )
            raise UnreadFileError(sentence, kind=f"looks like a file of {candidate.title}")


def make_no_megatron_run_error(path: str, launches: Sequence[Launch]) -> UnreadFileError:
    """Return the refusal of a launch script that starts no run of Megatron-LM."""
    framework = framework_signs.recognise_first_launch(launches)
    if framework is not None:
        return UnreadFileError(framework.refusal(path), kind=f"looks like {framework.name}")
    names = [launch.name for launch in launches if launch.line]
    programs = ", ".join(dict.fromkeys(names)) or "no program"
    sentence = OTHER_LAUNCHES_MESSAGE.format(path=path, programs=programs)
    return UnreadFileError(sentence, kind="starts no run of Megatron-LM")
