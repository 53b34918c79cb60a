"""`list_written_arguments`: the arguments of each run of a file of Megatron-LM.

A file may have several runs: the launches of a script, the groups of an argument file, the blocks
of a log.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bridge.errors import PayloadError, RunConfigError, UnreadFileError
from bridge.preflight.file_reading import MEGATRON_BRIDGE
from bridge.read import framework_signs
from bridge.read.framework.framework_table import find_table_by_clone
from bridge.read.framework.miles import find_model_arguments
from bridge.read.launch.launch import Launch
from bridge.read.launch.script_launches import read_document_launches
from bridge.read.megatron_lm.printed_arguments import BLOCK_START, parse_printed_arguments
from bridge.read.megatron_lm.recognition import is_megatron_launch
from bridge.read.megatron_lm.written_arguments import (
    WrittenArguments,
    find_argument_groups,
    parse_printed_runs,
    parse_runs,
)
from bridge.read.refusals import make_no_megatron_run_error
from bridge.read.text.document import Document
from bridge.read.text.repository_files import find_repository_file

TEST_GROUP = "MODEL_ARGS"
"""Key of the arguments in the files of Megatron-LM's own tests."""
SLIME_OR_MILES = "slime_or_miles"
"""Table of a launch that both frameworks may have written. The clone in which the script lies may
decide it."""
BRIDGE_PROGRAM = (
    "{path}: starts {program}, a program of Megatron Bridge with options of its own, which are not read. "
    "Give the run_config.yaml of a checkpoint of the run."
)


def may_have_arguments(document: Document) -> bool:
    """Return whether a document may have arguments of Megatron-LM, as any launch script may."""
    if document.kind == "shell" or BLOCK_START.search(document.text):
        return True
    return has_argument_groups(document)


def has_argument_groups(document: Document) -> bool:
    """Return whether a document has groups of arguments, as the files of Megatron-LM's tests have."""
    return bool(find_argument_groups(document.mapping)) or TEST_GROUP in document.mapping


def list_written_arguments(
    document: Document, variables: Mapping[str, str]
) -> list[WrittenArguments]:
    """Return the arguments of each run of a file, in the file's order.

    Raises:
        RunConfigError: The group `MODEL_ARGS` holds no arguments.
        UnreadFileError: The file cannot be read, or is a script that starts no run of Megatron-LM.
    """
    try:
        return _parse_document(document, variables)
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None


def _parse_document(document: Document, variables: Mapping[str, str]) -> list[WrittenArguments]:
    """Return the arguments of each run of a file. The errors are those of the parsers too."""
    if BLOCK_START.search(document.text):
        blocks = parse_printed_arguments(document.text)
        if blocks:
            return parse_printed_runs(blocks)
    if document.kind == "shell":
        return _parse_script(document, variables)
    if find_argument_groups(document.mapping):
        return parse_runs(document.mapping)
    if TEST_GROUP in document.mapping:
        raise RunConfigError.of(
            f"{document.path}: {TEST_GROUP}",
            "must be a mapping of arguments to their values",
            document.mapping[TEST_GROUP],
            "Write --num-layers: 4, for example.",
        )
    # A run without arguments, which `ParsedRun.require_arguments` refuses.
    return [WrittenArguments(label=TEST_GROUP)]


def _parse_script(document: Document, variables: Mapping[str, str]) -> list[WrittenArguments]:
    """Return the arguments of each run that a launch script starts.

    Raises:
        UnreadFileError: The script starts no run of Megatron-LM.
    """
    model = find_model_arguments(document.text, document.path, variables)
    launches = read_document_launches(document, {**model.variables, **variables})
    runs: list[WrittenArguments] = []
    for launch in launches:
        if is_megatron_launch(launch):
            _refuse_bridge_program(launch, document.path)
            runs += parse_runs([launch])
    if not runs:
        raise make_no_megatron_run_error(document.path, launches)
    for written in runs:
        written.path = document.path
        written.notes = model.read_too
        framework = written.framework
        if framework is not None and framework.name == SLIME_OR_MILES:
            written.framework = find_table_by_clone(Path(document.path)) or framework
    return runs


def _refuse_bridge_program(launch: Launch, path: str) -> None:
    """Refuse a launch whose program is at hand and imports Megatron Bridge.

    Such a program has a parser and defaults that are not those of Megatron-LM.

    Raises:
        UnreadFileError: The program is a program of Megatron Bridge.
    """
    if not launch.program.endswith(".py"):
        return
    program = find_repository_file(launch.program, Path(path))
    if program is None:
        return
    try:
        framework = framework_signs.recognise_file(Document.load(program))
    except PayloadError:
        return
    if framework is not None and framework.name == MEGATRON_BRIDGE:
        sentence = BRIDGE_PROGRAM.format(path=path, program=launch.name)
        raise UnreadFileError(sentence, kind="a program of Megatron Bridge")
