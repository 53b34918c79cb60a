"""`launch_of`: the launch that a command is, recognised by its words.

A command starts a training program where it runs a Python file or a module, where it is a command
that trains (`swift sft`), or where it has arguments of Megatron-LM.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from bridge.read.launch.job import SUBMIT
from bridge.read.launch.launches import Launch
from bridge.read.launch.script import MODES
from bridge.read.launch.signs import MEGATRON_ARGUMENTS, QUIET, ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge.read.launch.word import Word

RUNNERS = re.compile(ROWS["runners"])
STARTERS = tuple(ROWS["starters"].split())
COMMANDS = {name: re.compile(words) for name, words in ROWS["commands"].items()}
"""Command that trains without a Python file on its line -> pattern of the words behind it."""
MAX_WORDS = 40
"""Words of a command in which a runner, or the task of a command that trains, is looked for."""


def launch_of(words: list[Word], line: int) -> Launch | None:
    """Return the launch that a command is; None for a command that starts no training program."""
    if not words or (words[0] in QUIET and words[:3] != SUBMIT) or words[0].startswith("-"):
        return None
    if words[:3] == SUBMIT and "--" in words:
        return launch_of(words[[*map(str, words)].index("--") + 1 :], line)
    started = _started(words, line)
    if started is not None:
        return started
    if (MEGATRON_ARGUMENTS | MODES).isdisjoint(words):
        return None
    first = 0
    while not words[first].startswith("--"):
        first += 1
    return Launch(line=line, program=words[0], arguments=(*words[first:],))


def _started(words: Sequence[Word], line: int) -> Launch | None:
    """Return the launch of a Python file, of a module or of a command that trains."""
    runner = _runner(words)
    for place, word in enumerate(words):
        is_file = word.endswith(".py") and not word.startswith("-")
        if is_file or _is_command(words, place):
            return _launch(words, line, place, place)
        is_option = word == "-m" and runner < place < len(words) - 1
        if is_option and not words[place + 1].startswith(STARTERS):
            return _launch(words, line, place, place + 1)
    return None


def _runner(words: Sequence[Word]) -> int:
    """Return the place of the first word that runs Python programs; behind the words: none does."""
    for place, word in enumerate(words[:MAX_WORDS]):
        if RUNNERS.search(word):
            return place
    return len(words)


def _launch(words: Sequence[Word], line: int, end: int, program: int) -> Launch:
    """Return the launch of the program at a place, whose runner ends before another."""
    return Launch(
        line=line,
        runner=(*words[:end],),
        program=words[program],
        arguments=(*words[program + 1 :],),
    )


def _is_command(words: Sequence[Word], place: int) -> bool:
    """Return whether a word is a command that trains without a Python file on its line."""
    behind = COMMANDS.get(PurePosixPath(words[place]).name)
    if behind is None:
        return False
    return behind.match(" ".join(words[place + 1 : place + 1 + MAX_WORDS])) is not None
