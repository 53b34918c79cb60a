"""`find_launch`: recognises the command that starts a training program.

A command is a launch if it runs a Python file or a module, if it is a command that trains
(`swift sft`), or if it has arguments of Megatron-LM.
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
"""A word that runs a Python program: `python3`, `torchrun`."""
LAUNCHER_MODULES = tuple(COMMAND_LINE_ROWS["starters"].split())
"""Modules that start a program: `python -m torch.distributed.run`. The program is after them."""
TRAINING_COMMANDS = {
    name: re.compile(words) for name, words in COMMAND_LINE_ROWS["commands"].items()
}
"""Command that trains without a Python file on its line -> pattern of the words after it."""
MAX_SEARCHED_WORDS = 40
"""Words of a command in which a runner, or the task of a command that trains, is looked for."""


def find_launch(words: list[ShellWord], line: int) -> Launch | None:
    """Return the launch of a command; None for a command that starts no training program.

    Args:
        words: The command, expanded.
        line: Its line in the script.
    """
    if not words or words[0].startswith("-"):
        return None
    is_ray_submit = words[:3] == RAY_SUBMIT_COMMAND
    if words[0] in NON_TRAINING_PROGRAMS and not is_ray_submit:
        return None
    if is_ray_submit and "--" in words:
        job_index = [*map(str, words)].index("--") + 1
        return find_launch(words[job_index:], line)
    launch = _find_program_launch(words, line)
    if launch is not None:
        return launch
    if (MEGATRON_ARGUMENTS | MODE_OPTIONS).isdisjoint(words):
        return None
    # An unknown program with arguments of Megatron-LM: it ends at the first of its arguments.
    first_argument = 0
    while not words[first_argument].startswith("--"):
        first_argument += 1
    return Launch(line=line, program=words[0], arguments=(*words[first_argument:],))


def _find_program_launch(words: Sequence[ShellWord], line: int) -> Launch | None:
    """Return the launch of a Python file, of a module or of a command that trains."""
    runner_index = _find_runner_index(words)
    for index, word in enumerate(words):
        is_file = word.endswith(".py") and not word.startswith("-")
        if is_file or _is_training_command(words, index):
            return _make_launch(words, line, runner_end=index, program_index=index)
        is_module_option = word == "-m" and runner_index < index < len(words) - 1
        if is_module_option and not words[index + 1].startswith(LAUNCHER_MODULES):
            return _make_launch(words, line, runner_end=index, program_index=index + 1)
    return None


def _find_runner_index(words: Sequence[ShellWord]) -> int:
    """Return the index of the first word that runs Python programs; the number of words if none does."""
    for index, word in enumerate(words[:MAX_SEARCHED_WORDS]):
        if RUNNER_PATTERN.search(word):
            return index
    return len(words)


def _make_launch(
    words: Sequence[ShellWord], line: int, *, runner_end: int, program_index: int
) -> Launch:
    """Return a launch.

    Args:
        words: The command.
        line: Its line in the script.
        runner_end: The index of the first word that is no part of the runner.
        program_index: The index of the program; the arguments are after it.
    """
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
    first_arguments = " ".join(words[index + 1 : index + 1 + MAX_SEARCHED_WORDS])
    return arguments_pattern.match(first_arguments) is not None
