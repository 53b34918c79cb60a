"""`read_file`: a file that describes a run, read by the module of the framework that wrote it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import RunConfigError, UnreadFileError
from bridge.precision import strict_yaml
from bridge.preflight.file_reading import (
    MEGATRON_BRIDGE,
    MEGATRON_LM,
    PRECISION_BRIDGE,
    FileReading,
    RunChoice,
)
from bridge.preflight.origins import Origins
from bridge.preflight.problems import Problems
from bridge.read.debug_features import unfollowed_features
from bridge.read.keys import (
    KEYS,
    OWNERS,
    PRECISION,
    RUN_KEYS,
    SECTIONS,
    fields_of,
    refuse_unknown_sections,
)
from bridge.read.layer_source import unplanned_kitchen
from bridge.read.megatron_bridge import run as megatron_bridge
from bridge.target.target import Target

if TYPE_CHECKING:
    from bridge.read.text.document import Document

MAPPINGS = (*OWNERS, *SECTIONS)
OURS = (".yaml", ".yml")
SAVED = ".pt"
MOST_SAVED_BYTES = 64 * 2**20
"""Of the part of a checkpoint that has the arguments of its run."""
SIZES = ("num_layers", "hidden_size", "num_attention_heads")
ARGUMENTS = re.compile(rb"ARGS\w*[\"']?\s*:|^\s*[\"']?--[a-z]", re.MULTILINE)
"""In a file of Megatron-LM's arguments."""
FRAMEWORK = re.compile(
    rb"^['\"]?(?:modules|policy|actor_rollout_ref|defaults|micro_batch_size|system)['\"]?\s*:",
    re.MULTILINE,
)
"""In a file of a framework on top of Megatron Core."""
FILES = ("config.yaml", "run_config.yaml", "common.pt")
ITERATION = "iter_*"
"""Folder of one iteration in a folder of checkpoints."""


def read_file(path: Path, choice: RunChoice | None = None) -> FileReading:
    """Return what a file says of a run; what stands in it decides which framework wrote it.

    Raises:
        UnreadFileError: It cannot be read, or describes no run.
        RunConfigError: Its sections cannot be those of a run.
    """
    limit = MOST_SAVED_BYTES if path.suffix == SAVED else strict_yaml.MAX_BYTES
    data = strict_yaml.read_bytes(path, error=UnreadFileError, limit=limit)
    if path.suffix in OURS and FRAMEWORK.search(data):
        from bridge.read.framework.files import read_framework  # few files are a framework's

        found = read_framework(_mapping(data, path), path, choice or RunChoice())
        if found is not None:
            return found
    if path.suffix not in OURS or ARGUMENTS.search(data):
        from bridge.read import foreign
        from bridge.read.framework.launches import maybe_read
        from bridge.read.megatron_lm import run as megatron_lm

        document = megatron_lm.document_of(data, path)
        found = _of_program(document, choice) or maybe_read(document, choice or RunChoice())
        if found is not None:
            return found
        foreign.refuse_framework(document)
        if megatron_lm.is_of(document):
            if choice is not None:
                choice.refuse_checkpoint(path)
            return megatron_lm.read(document, choice or RunChoice())
    if choice is not None:
        choice.refuse_for(path)
        choice.refuse_checkpoint(path)
    whole = _mapping(data, path)
    if megatron_bridge.is_of(whole):
        return megatron_bridge.read(whole, path)
    if not all(key in KEYS for key in whole) or not _states_a_run(whole):
        from bridge.read import foreign

        foreign.refuse_sections(whole, path)
    return FileReading(sections=_own(whole, path.name))


def _of_program(document: Document, choice: RunChoice | None) -> FileReading | None:
    """Return what a Python program of Megatron Bridge says of a run; None for any other document."""
    if document.kind != "python":
        return None
    from bridge.read import framework_signs
    from bridge.read.megatron_bridge.recipes import read_program  # few files are programs

    framework = framework_signs.recognise_file(document)
    if framework is None or framework.name != MEGATRON_BRIDGE:
        return None
    return read_program(document, choice or RunChoice())


def _states_a_run(whole: Mapping[str, Any]) -> bool:
    """Return whether sections are empty, or state something that a run has."""
    if any(whole.get(key) is not None for key in (PRECISION, *RUN_KEYS)):
        return True
    stated = [
        (key, name) for key in MAPPINGS if isinstance(whole.get(key), dict) for name in whole[key]
    ]
    return not stated or any(name in fields_of(key) for key, name in stated)


def file_in(folder: Path) -> Path:
    """Return the file of a folder that describes its run; the folder itself where there is none.

    That is the ``config.yaml`` of a run of ours, the ``run_config.yaml`` of a checkpoint of Megatron Bridge, or the
    ``common.pt`` of one of Megatron-LM, in its newest iteration where the folder holds several.
    """
    places = (folder, *sorted(folder.glob(ITERATION), reverse=True))
    return next(
        (place / name for place in places for name in FILES if (place / name).is_file()), folder
    )


def _mapping(data: bytes, path: Path) -> dict[str, Any]:
    text = strict_yaml.decoded(data, str(path), error=UnreadFileError)
    documents = strict_yaml.load_all(text, str(path), error=UnreadFileError)
    if len(documents) > 1:
        sentence = f"{path}: must hold one document, got {len(documents)}. Remove the others."
        raise UnreadFileError(sentence, kind="several documents")
    if not documents or documents[0] is None:
        sentence = (
            f"{path}: is empty, and describes no run. Give a file with sections such as model."
        )
        raise UnreadFileError(sentence, kind="it is empty")
    whole = documents[0]
    if not isinstance(whole, dict):
        rule = "must hold sections such as model and mixed_precision"
        sentence = f"{path}: {rule}, got {type(whole).__name__}. Give a file of such sections."
        raise UnreadFileError(sentence, kind="no sections of a run")
    return whole


def _own(whole: dict[str, Any], name: str) -> dict[str, Any]:
    problems = Problems(Origins.of_keys(map(str, whole), name))
    refuse_unknown_sections(whole, problems)
    for key in MAPPINGS:
        if not isinstance(whole.get(key), dict | None):
            problems.add(
                key, "must be a mapping of fields", whole[key], f"Write {key}.FIELD=VALUE."
            )
    problems.raise_any()
    return whole


def started(reading: FileReading, sections: dict[str, Any], target: Target) -> FileReading:
    """Write what the framework sets at the start of these sections into them, and return the reading with it."""
    if reading.framework == PRECISION_BRIDGE:
        return reading
    from bridge.read.framework import start as framework_start
    from bridge.read.megatron_bridge import start as megatron_bridge_start
    from bridge.read.megatron_lm import start as megatron_lm_start
    from bridge.read.start import Start, derived  # only a file of another framework needs it

    is_lm = reading.settings_of == MEGATRON_LM
    rows = list(megatron_bridge_start.ROWS) if reading.settings_of == MEGATRON_BRIDGE else []
    if is_lm:
        rows = megatron_lm_start.rows_of(sections)
    gpus = target.count
    if reading.base:
        reading = framework_start.with_variables(reading, target)
        rows = framework_start.with_framework(reading.framework, rows, sections)
    found = derived(sections, reading.own_fields, gpus, rows)
    unknown = [
        *reading.unknown,
        *(megatron_lm_start.left_open(reading.own_fields, gpus) if is_lm else ()),
    ]
    start = Start(
        sections=sections, own_fields={}, gpus=gpus
    )  # an override may state what a sentence begins with
    unknown = [one for one in unknown if start.stated(one.partition(":")[0]) is None]
    unplanned = reading.unplanned
    if unplanned is not None and start.stated(unplanned.partition(":")[0]) is not None:
        unplanned = None
    unplanned = unplanned or unfollowed_features(sections) or unplanned_kitchen(sections)
    return replace(reading, derived=found, unknown=tuple(unknown), unplanned=unplanned)


def refuse_without_sizes(reading: FileReading, model: Mapping[str, Any], path: str) -> None:
    """Refuse a model of another framework's file whose sizes neither the file nor an override states."""
    if reading.other_layers is not None:
        raise RunConfigError(str(reading.unplanned))
    absent = [f"model.{name}" for name in SIZES if model.get(name) is None]
    if absent and reading.settings_of == MEGATRON_LM:
        rule = f"does not state {', '.join(absent)}, or only when it runs"
        raise RunConfigError(f"{path}: {rule}. Add {' '.join(f'{one}=VALUE' for one in absent)}.")
    decider = reading.opened.get(f"model.{SIZES[0]}")
    if absent and decider is not None:
        rule = f"does not state {', '.join(absent)}, which {decider} decides"
        sizes = " ".join(f"{name}=VALUE" for name in absent)
        remedy = f"Add --context checkpoint=FOLDER, which has that file; or {sizes}"
        raise RunConfigError(f"{path}: {rule}. {remedy}.")
