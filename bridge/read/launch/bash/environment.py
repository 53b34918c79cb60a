"""`compute_environment`: the variables that `env NAME=value` or `mpirun -x NAME=value` gives to a program."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

from bridge.read.launch.bash.shell import NAME_PATTERN
from bridge.read.launch.shell_word import ShellWord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def compute_environment(
    words: Sequence[str], inherited: Mapping[str, ShellWord]
) -> dict[str, ShellWord]:
    """Return the environment of a program.

    Args:
        words: The command in front of the program: `env NAME=value`, `mpirun -x NAME=value`.
        inherited: The variables that the shell exports.
    """
    environment = dict(inherited)
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name == "env":
            environment = _apply_env_command(words[index + 1 :], environment)
        elif name in ("mpirun", "mpiexec"):
            for option, value in pairwise(words[index + 1 :]):
                variable, sign, text = value.partition("=")
                if option == "-x" and sign:
                    environment[variable] = ShellWord.from_text(text)
    return environment


def _apply_env_command(
    words: Sequence[str], inherited: Mapping[str, ShellWord]
) -> dict[str, ShellWord]:
    """Return the environment of the program after `env`.

    Args:
        words: The words after `env`: its options, assignments and the program.
        inherited: The variables that `env` has itself.
    """
    environment = dict(inherited)
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        name, sign, value = word.partition("=")
        if word in ("-u", "--unset"):
            if remaining:
                environment.pop(remaining.pop(0), None)
        elif word.startswith("--unset="):
            environment.pop(value, None)
        elif word in ("-i", "-", "--ignore-environment"):
            environment = {}
        elif word in ("-C", "--chdir", "-S"):
            remaining = remaining[1:]  # the value of the option
        elif re.fullmatch(r"-u\w+", word):
            environment.pop(word.removeprefix("-u"), None)
        elif sign and NAME_PATTERN.fullmatch(name):
            environment[name] = ShellWord.from_text(value)
        elif not word.startswith("-"):
            break  # the program; the words after it are its own
    return environment
