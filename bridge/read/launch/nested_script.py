"""`find_nested_script`: the script that a command gives to another shell.

    bash -c "torchrun pretrain.py"        with the environment of this shell
    ssh host "torchrun pretrain.py"       on another host, without it

`ScriptInterpreter` follows the text as a script of its own shell.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from bridge.read.launch.command_line_rows import COMMAND_LINE_ROWS, NON_TRAINING_PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Sequence

SHELL_PROGRAMS = frozenset(COMMAND_LINE_ROWS["shells"].split())
SCRIPT_SUFFIX = ".sh"
REMOTE_SHELLS = frozenset({"ssh", "sshpass"})
PREFIX_PROGRAMS = frozenset({"nohup", "timeout", "exec", "time", "sudo", "env", "setsid", "stdbuf"})
"""Commands in front of a remote shell."""
SHELL_OPTIONS_WITH_TEXT = re.compile(r"-\w*c")
"""The option of a shell whose value is a script: `-c`, `-lc`."""
SSH_OPTIONS_WITH_VALUE = re.compile(r"-[46AaCfGgKkMNnqsTtVvXxYy]*[BbcDEeFIiJLlmOopQRSWw]")
"""Options of `ssh` whose last letter takes the next word as its value."""


@dataclass(frozen=True, kw_only=True)
class NestedScript:
    """A script that a command gives to a shell."""

    text: str
    shell_index: int
    """The index of the shell among the words of the command."""
    is_remote: bool = False
    """Whether the shell runs on another host, which has none of the variables."""


def find_nested_script(words: Sequence[str]) -> NestedScript | None:
    """Return the script that a command gives to a shell; None for other commands."""
    if words[0] in NON_TRAINING_PROGRAMS:
        return None
    for index, program in enumerate(words):
        name = program.rpartition("/")[2]
        if name in REMOTE_SHELLS and (index == 0 or words[index - 1] in PREFIX_PROGRAMS):
            text = _get_command_after_host(words[index + 1 :])
            if not text:
                return None
            return NestedScript(text=text, shell_index=index, is_remote=True)
        if name in SHELL_PROGRAMS:
            text_of_option = _find_text_after_option(words[index + 1 :])
            if text_of_option is not None:
                return NestedScript(text=text_of_option, shell_index=index)
    return None


def find_started_script(words: Sequence[str]) -> str | None:
    """Return the file of a script that a command runs in a shell of its own; None for others."""
    if words[0] in NON_TRAINING_PROGRAMS:
        return None
    if words[0].endswith(SCRIPT_SUFFIX):
        return words[0]
    for program, argument in pairwise(words):
        if program.rpartition("/")[2] in SHELL_PROGRAMS and argument.endswith(SCRIPT_SUFFIX):
            return argument
    return None


def _find_text_after_option(words: Sequence[str]) -> str | None:
    """Return the text after `-c` of a shell; None if the shell runs a file."""
    for index, option in enumerate(words):
        if SHELL_OPTIONS_WITH_TEXT.fullmatch(option) and index + 1 < len(words):
            return words[index + 1]
        if not option.startswith(("-", "+")) and option != "pipefail":  # `bash -o pipefail -c`
            return None
    return None


def _get_command_after_host(words: Sequence[str]) -> str:
    """Return the command that `ssh [options] host command` runs; empty if there is none."""
    rest = list(words)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if SSH_OPTIONS_WITH_VALUE.fullmatch(option):
            rest = rest[1:]
    return " ".join(rest[1:])
