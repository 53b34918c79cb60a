"""`compute_environment`: the variables that a command in front of a program gives to it."""

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
    """Return the variables of a program behind `env`, `mpirun -x` and their like.

    Args:
        words: The command before the program.
        inherited: The variables that the shell gives it.
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
    """Return the variables that `env` gives to the program behind it."""
    environment = dict(inherited)
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, sign, value = word.partition("=")
        if word in ("-u", "--unset"):
            if rest:
                environment.pop(rest.pop(0), None)
        elif word.startswith("--unset="):
            environment.pop(value, None)
        elif word in ("-i", "-", "--ignore-environment"):
            environment = {}
        elif word in ("-C", "--chdir", "-S"):
            rest = rest[1:]
        elif re.fullmatch(r"-u\w+", word):
            environment.pop(word[2:], None)
        elif sign and NAME_PATTERN.fullmatch(name):
            environment[name] = ShellWord.from_text(value)
        elif not word.startswith("-"):
            break
    return environment
