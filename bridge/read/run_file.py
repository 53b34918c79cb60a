"""`load_file_reading`: the `FileReading` of a file that describes a run, whatever framework it is for.

The framework is recognised by the content of the file, in this order:

    modules:, policy:, actor_rollout_ref: ...    a framework on top of Megatron Core   framework/
    --options, MODEL_ARGS:, a launch script      Megatron-LM                           megatron_lm/
    _target_: megatron.bridge...                 Megatron Bridge                       megatron_bridge/
    model:, optimizer:, mixed_precision:         Precision Bridge                      this file
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import PayloadError, UnreadFileError
from bridge.precision import strict_yaml
from bridge.preflight.file_reading import MEGATRON_BRIDGE, FileReading
from bridge.preflight.origins import Origins
from bridge.preflight.problems import Problems
from bridge.preflight.run_choice import RunChoice
from bridge.read.megatron_bridge import saved_container as megatron_bridge
from bridge.read.run_keys import (
    NON_SECTION_KEYS,
    OWNER_SECTIONS,
    PRECISION_KEY,
    RUN_CONFIG_KEYS,
    SECTION_CLASSES,
    add_malformed_sections,
    get_section_fields,
    refuse_unknown_sections,
)
from bridge.read.text.checkpoint_arguments import CHECKPOINT_SUFFIX

if TYPE_CHECKING:
    from bridge.read.text.document import Document

MAPPING_SECTIONS = (*OWNER_SECTIONS, *SECTION_CLASSES)
"""Sections that are mappings of fields."""
YAML_SUFFIXES = (".yaml", ".yml")
MAX_CHECKPOINT_BYTES = 64 * 2**20
"""Bytes of the largest `common.pt` that is read, the part of a checkpoint with the arguments."""
ARGUMENTS_PATTERN = re.compile(rb"ARGS\w*[\"']?\s*:|^\s*[\"']?--[a-z]", re.MULTILINE)
"""A text that every YAML file of Megatron-LM's arguments has."""
FRAMEWORK_KEY_PATTERN = re.compile(
    rb"^['\"]?(?:modules|policy|actor_rollout_ref|actor_train|sft_train|student|student_train|defaults"
    rb"|micro_batch_size|system)['\"]?\s*:",
    re.MULTILINE,
)
"""A top-level key that every YAML file of a framework in `framework/yaml_reader_registry.py` has.

A file without such a key is not compared with the signs in `framework_signs.yaml`: to load them
takes longer than to read a file of ours. So the keys of a new framework belong here too."""
RUN_FILE_NAMES = ("config.yaml", "run_config.yaml", "common.pt")
"""Files of a folder that describe its run: ours, Megatron Bridge's and Megatron-LM's."""
ITERATION_FOLDER_GLOB = "iter_*"
"""Folder of an iteration in a folder of checkpoints."""


def load_file_reading(path: Path, choice: RunChoice | None = None) -> FileReading:
    """Return the run that a file describes.

    Args:
        path: The file.
        choice: The run to read if the file has several, and the variables of its environment. Only
            the files of Megatron-LM and of frameworks have several runs, or variables.

    Raises:
        UnreadFileError: The file cannot be read, or describes no run.
        RunConfigError: Its sections cannot be those of a run.
    """
    choice = choice or RunChoice()
    limit = strict_yaml.MAX_BYTES
    if path.suffix == CHECKPOINT_SUFFIX:
        limit = MAX_CHECKPOINT_BYTES
    data = strict_yaml.read_bytes(path, error=UnreadFileError, limit=limit)
    is_yaml = path.suffix in YAML_SUFFIXES
    config: dict[str, Any] | None = None
    if is_yaml and FRAMEWORK_KEY_PATTERN.search(data):
        from bridge.read.framework.yaml_reader_registry import (
            read_framework,  # few files are a framework's
        )

        config = _parse_yaml_mapping(data, path)
        reading = read_framework(config, path, choice)
        if reading is not None:
            return reading
    if not is_yaml or ARGUMENTS_PATTERN.search(data):
        reading = _maybe_read_arguments(data, path, choice)
        if reading is not None:
            return reading
    choice.refuse_for(path)
    choice.refuse_checkpoint(path)
    if config is None:
        config = _parse_yaml_mapping(data, path)
    return _read_sections(config, path)


def _maybe_read_arguments(data: bytes, path: Path, choice: RunChoice) -> FileReading | None:
    """Return the run of a program, a launch script or another file with Megatron-LM's arguments.

    Returns:
        None if the file has no arguments.

    Raises:
        UnreadFileError: The file is of a framework that is not read.
    """
    from bridge.read import refusals
    from bridge.read.framework.launch_reader_registry import maybe_read_script
    from bridge.read.framework.python_launcher import maybe_read_launcher
    from bridge.read.megatron_lm import file_arguments, run_reader  # few files are Megatron-LM's
    from bridge.read.text.document import Document

    document = choice.documents.get(path)
    if not isinstance(document, Document):
        document = _make_document(data, path)
        document = maybe_read_launcher(document, choice.variables) or document
    if document.kind == "shell":
        choice.documents[path] = document
    reading = _maybe_read_program(document, choice) or maybe_read_script(document, choice)
    if reading is not None:
        return reading
    refusals.refuse_framework(document)
    if file_arguments.may_have_arguments(document):
        choice.refuse_checkpoint(path)
        return run_reader.make_file_reading(document, choice)
    return None


def _make_document(data: bytes, path: Path) -> Document:
    """Return the contents of a file as a document.

    Raises:
        UnreadFileError: The contents cannot be read.
    """
    from bridge.read.text.document import Document

    try:
        return Document.from_bytes(data, str(path))
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None


def _maybe_read_program(document: Document, choice: RunChoice) -> FileReading | None:
    """Return the run of a Python program of Megatron Bridge; None for any other document."""
    if document.kind != "python":
        return None
    from bridge.read import framework_signs
    from bridge.read.megatron_bridge.program_file import read_program  # few files are programs

    framework = framework_signs.recognise_file(document)
    if framework is None or framework.name != MEGATRON_BRIDGE:
        return None
    return read_program(document, choice)


def _read_sections(config: dict[str, Any], path: Path) -> FileReading:
    """Return the run of a file with the sections of Megatron Bridge or of Precision Bridge.

    Raises:
        UnreadFileError: The file has other sections.
        RunConfigError: Its sections cannot be those of a run.
    """
    if megatron_bridge.is_saved_container(config):
        return megatron_bridge.read_saved_container(config, path)
    if not all(key in RUN_CONFIG_KEYS for key in config) or not _states_a_run(config):
        from bridge.read import refusals

        refusals.refuse_sections(config, path)
    _require_valid_sections(config, path.name)
    return FileReading(sections=config)


def _states_a_run(config: Mapping[str, Any]) -> bool:
    """Return whether sections state a field or a setting of a run. Empty sections are a run too."""
    if any(config.get(key) is not None for key in (PRECISION_KEY, *NON_SECTION_KEYS)):
        return True
    is_empty = True
    for section in MAPPING_SECTIONS:
        fields = config.get(section)
        if not isinstance(fields, dict):
            continue
        for name in fields:
            is_empty = False
            if name in get_section_fields(section):
                return True
    return is_empty


def _require_valid_sections(config: Mapping[str, Any], name: str) -> None:
    """Refuse unknown sections, and sections that are no mappings.

    They are refused before overrides are written: an override of a field would replace a section
    that is no mapping.

    Args:
        config: The sections.
        name: The name of the file in messages.

    Raises:
        RunConfigError: There is such a section. The message lists all of them.
    """
    problems = Problems(Origins.from_keys(map(str, config), name))
    refuse_unknown_sections(config, problems)
    add_malformed_sections(config, MAPPING_SECTIONS, problems)
    problems.raise_any()


def locate_run_file(folder: Path) -> Path:
    """Return the file in a folder that describes its run; the folder itself if there is none.

    The file is the `config.yaml` of a run of ours, the `run_config.yaml` of a checkpoint of
    Megatron Bridge, or the `common.pt` of a checkpoint of Megatron-LM. In a folder of checkpoints
    it is that of the newest one.
    """
    for location in (folder, *sorted(folder.glob(ITERATION_FOLDER_GLOB), reverse=True)):
        for name in RUN_FILE_NAMES:
            file = location / name
            if file.is_file():
                return file
    return folder


def _parse_yaml_mapping(data: bytes, path: Path) -> dict[str, Any]:
    """Return the mapping that a YAML file holds.

    Raises:
        UnreadFileError: The file is no YAML, is empty, or holds another value or several documents.
    """
    text = strict_yaml.decode_text(data, str(path), error=UnreadFileError)
    documents = strict_yaml.load_documents(text, str(path), error=UnreadFileError)
    if len(documents) > 1:
        sentence = f"{path}: must hold one document, got {len(documents)}. Remove the others."
        raise UnreadFileError(sentence, kind="several documents")
    if not documents or documents[0] is None:
        rule = "is empty, and describes no run"
        sentence = f"{path}: {rule}. Give a file with sections such as model."
        raise UnreadFileError(sentence, kind="it is empty")
    config = documents[0]
    if not isinstance(config, dict):
        rule = "must hold sections such as model and mixed_precision"
        sentence = f"{path}: {rule}, got {type(config).__name__}. Give a file of such sections."
        raise UnreadFileError(sentence, kind="no sections of a run")
    return config
