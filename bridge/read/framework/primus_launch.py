"""`read_launch`: a launch script that starts an experiment of Primus by `primus-cli`.

    primus-cli direct -- train pretrain --config examples/exp.yaml --micro_batch_size 8 fp8=hybrid

Primus writes the words after the file over the `overrides` of the experiment. The variables that the
script exports are those of the experiment.

Source: AMD-AGI/Primus fd1eeabb of 2026-08-22, primus/core/launcher/parser.py, primus/core/utils/arg_utils.py
parse_cli_overrides, primus/core/runtime/train_runtime.py _apply_overrides.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bridge.errors import PayloadError, UnreadFileError
from bridge.preflight.file_reading import FileReading
from bridge.preflight.run_choice import RunChoice
from bridge.read.framework import primus
from bridge.read.launch.launch import Launch
from bridge.read.launch.shell_word import ShellWord
from bridge.read.megatron_lm.flags import get_argument_fields
from bridge.read.text.document import Document
from bridge.read.text.repository_files import find_repository_file

TASK_WORD = "train"
"""The word of a command line before the task, which is `pretrain` or `posttrain`."""
FILE_OPTIONS = ("config", "exp")
PROGRAM_OPTIONS = ("data_path", "backend_path", "export_config")
"""Options of the program that are no settings of the run."""
SAME_HOST = "direct"
"""The mode of `primus-cli` in which the run has every exported variable."""
PASSED_PREFIX = "PRIMUS_"
"""Beginning of the variables that a container of the other modes gets."""
CONTAINER_STARTS = ("[", "(", "{")
QUOTED_PATTERN = re.compile(r"(['\"]).*\1")
QUOTES_PASSED_ON = (
    "--{key}: the word has quotes in it, which primus-cli passes on; the value is not read."
)
NOTE_NOT_READ = "{note}: is not read."
FILE_WAS_READ = "--config {name}: read from {path}."
NO_FILE = "{path}: starts {name} with the file {file}, which is not found from here. Give that YAML file itself."
OTHER_FRAMEWORK = (
    "{path}: starts {name} with {file}, no experiment on Megatron-LM. Give that YAML file itself."
)


@dataclass(kw_only=True, slots=True)
class _CommandLine:
    """The words of a launch after its task."""

    file: str = ""
    """Name of the experiment's file; empty if no word names it."""
    overrides: dict[str, Any] = field(default_factory=dict)
    quoted: dict[str, str] = field(default_factory=dict)
    """Key whose value has quotes around it, within the word -> the value."""


def read_launch(launch: Launch, script: Path, choice: RunChoice) -> FileReading:
    """Return what one launch of a script says: the experiment with the overrides of the command line.

    Raises:
        UnreadFileError: The experiment is not found, or does not train on Megatron-LM.
        RunConfigError: A file of the experiment cannot be read.
    """
    command_line = _parse_command_line(launch.arguments)
    path = find_repository_file(command_line.file, script)
    if path is None:
        sentence = NO_FILE.format(path=script, name=launch.name, file=command_line.file)
        raise UnreadFileError(sentence, kind="its file is not found")
    config = _load_experiment(path)
    if not primus.is_of(config):
        sentence = OTHER_FRAMEWORK.format(path=script, name=launch.name, file=command_line.file)
        raise UnreadFileError(sentence, kind="an experiment of another framework")
    choice = replace(choice, variables={**_get_passed_variables(launch), **choice.variables})
    origin = f"{script.name}:{launch.line}"
    stated = primus.StatedOverrides(values=command_line.overrides, origin=origin)
    reading = primus.read(config, path, choice, stated)
    reading = _add_unread_parts(reading, launch, command_line)
    reading = replace(
        reading, environment={**reading.environment, **_get_known_environment(launch)}
    )
    return reading.with_notes(FILE_WAS_READ.format(name=command_line.file, path=path))


def _load_experiment(path: Path) -> Mapping[str, Any]:
    """Return the contents of an experiment.

    Raises:
        UnreadFileError: The file is no mapping.
    """
    try:
        return Document.load(path).mapping
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None


def _add_unread_parts(
    reading: FileReading, launch: Launch, command_line: _CommandLine
) -> FileReading:
    """Return a reading with the parts of a script that are not read.

    The settings of a value with quotes within its word are open.
    """
    open_values = dict(reading.uncertainty.open_values)
    sentences = [NOTE_NOT_READ.format(note=note) for note in launch.notes]
    for key, text in command_line.quoted.items():
        sentences.append(QUOTES_PASSED_ON.format(key=key))
        open_values.update(dict.fromkeys(get_argument_fields(key), text))
    uncertainty = replace(
        reading.uncertainty,
        open_values=open_values,
        open_points=(*reading.uncertainty.open_points, *sentences),
    )
    return replace(reading, uncertainty=uncertainty)


def _parse_command_line(words: Sequence[ShellWord]) -> _CommandLine:
    """Return the file and the overrides of a command line.

    An override is `key=value`, `--key=value` or `--key value`. A key without a value is on. A dot
    in a key leads into a mapping.
    """
    command_line = _CommandLine()
    rest = [str(word) for word in words]
    if TASK_WORD in rest:
        rest = rest[rest.index(TASK_WORD) + 2 :]
    while rest:
        name, sign, value = rest.pop(0).partition("=")
        is_option = name.startswith("--")
        if not sign and is_option:
            value = "true"
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
        elif not sign:
            continue
        key = name.lstrip("-").strip()
        if is_option and key in FILE_OPTIONS:
            command_line.file = value
        elif not (is_option and key in PROGRAM_OPTIONS):
            parsed_value = _parse_value(value.strip())
            if QUOTED_PATTERN.fullmatch(value.strip()):
                command_line.quoted[key] = value.strip()
                parsed_value = None
            _write_override(command_line.overrides, key, parsed_value)
    return command_line


def _write_override(overrides: dict[str, Any], key: str, value: object) -> None:
    """Write a value under a dotted key."""
    *holders, name = key.split(".")
    for holder in holders:
        inner = overrides.get(holder)
        if not isinstance(inner, dict):
            inner = {}
            overrides[holder] = inner
        overrides = inner
    overrides[name] = value


def _parse_value(text: str) -> Any:
    """Return the value of an override as Primus converts its text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text == "None":
        return None
    if text.startswith(CONTAINER_STARTS):
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text
    try:
        if "." in text:
            return float(text)
        return int(text)
    except ValueError:
        return text


def _get_passed_variables(launch: Launch) -> dict[str, str]:
    """Return the exported variables that the run of a launch has for certain."""
    environment = _get_known_environment(launch)
    if SAME_HOST in launch.arguments[:1]:
        return environment
    return {name: text for name, text in environment.items() if name.startswith(PASSED_PREFIX)}


def _get_known_environment(launch: Launch) -> dict[str, str]:
    """Return the variables of a launch whose value is known before the run starts."""
    return {name: str(value) for name, value in launch.environment.items() if not value.is_open}
