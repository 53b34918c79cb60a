"""`find_launch`: the launch that a command is, recognised by its words.

A command starts a training program where it runs a Python file or a module, where it is a command
that trains (`swift sft`), or where it has arguments of Megatron-LM.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from bridge.read.launch.command_line_rows import (
    COMMAND_LINE_ROWS,
    MEGATRON_ARGUMENTS,
    NON_TRAINING_PROGRAMS,
)
from bridge.read.launch.launch import Launch
from bridge.read.launch.ray_job import RAY_SUBMIT_COMMAND
from bridge.read.launch.syntax_tree import MODE_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge.read.launch.shell_word import ShellWord

RUNNER_PATTERN = re.compile(COMMAND_LINE_ROWS["runners"])
LAUNCHER_MODULES = tuple(COMMAND_LINE_ROWS["starters"].split())
TRAINING_COMMANDS = {
    name: re.compile(words) for name, words in COMMAND_LINE_ROWS["commands"].items()
}
"""Command that trains without a Python file on its line -> pattern of the words behind it."""
MAX_SEARCHED_WORDS = 40
"""Words of a command in which a runner, or the task of a command that trains, is looked for."""


def find_launch(words: list[ShellWord], line: int) -> Launch | None:
    """Return the launch that a command is; None for a command that starts no training program."""
    if (
        not words
        or (words[0] in NON_TRAINING_PROGRAMS and words[:3] != RAY_SUBMIT_COMMAND)
        or words[0].startswith("-")
    ):
        return None
    if words[:3] == RAY_SUBMIT_COMMAND and "--" in words:
        return find_launch(words[[*map(str, words)].index("--") + 1 :], line)
    started = _find_program_launch(words, line)
    if started is not None:
        return started
    if (MEGATRON_ARGUMENTS | MODE_OPTIONS).isdisjoint(words):
        return None
    first = 0
    while not words[first].startswith("--"):
        first += 1
    return Launch(line=line, program=words[0], arguments=(*words[first:],))


def _find_program_launch(words: Sequence[ShellWord], line: int) -> Launch | None:
    """Return the launch of a Python file, of a module or of a command that trains."""
    runner = _find_runner_index(words)
    for index, word in enumerate(words):
        is_file = word.endswith(".py") and not word.startswith("-")
        if is_file or _is_training_command(words, index):
            return _make_launch(words, line, index, index)
        is_option = word == "-m" and runner < index < len(words) - 1
        if is_option and not words[index + 1].startswith(LAUNCHER_MODULES):
            return _make_launch(words, line, index, index + 1)
    return None


def _find_runner_index(words: Sequence[ShellWord]) -> int:
    """Return the place of the first word that runs Python programs; behind the words: none does."""
    for index, word in enumerate(words[:MAX_SEARCHED_WORDS]):
        if RUNNER_PATTERN.search(word):
            return index
    return len(words)


def _make_launch(
    words: Sequence[ShellWord], line: int, runner_end: int, program_index: int
) -> Launch:
    """Return the launch of the program at a place, whose runner ends before another."""
    return Launch(
        line=line,
        runner=(*words[:runner_end],),
        program=words[program_index],
        arguments=(*words[program_index + 1 :],),
    )


def _is_training_command(words: Sequence[ShellWord], index: int) -> bool:
    """Return whether a word is a command that trains without a Python file on its line."""
    arguments_pattern = TRAINING_COMMANDS.get(PurePosixPath(words[index]).name)
    if arguments_pattern is None:
        return False
    return (
        arguments_pattern.match(" ".join(words[index + 1 : index + 1 + MAX_SEARCHED_WORDS]))
        is not None
    )
