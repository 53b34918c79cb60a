"""`environment_of`: the variables that a command in front of a program gives to it."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

from bridge.read.launch.shell import NAME
from bridge.read.launch.word import Word

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def environment_of(words: Sequence[str], inherited: Mapping[str, Word]) -> dict[str, Word]:
    """Return the variables of a program behind `env`, `mpirun -x` and their like.

    Args:
        words: The command before the program.
        inherited: The variables that the shell gives it.
    """
    environment = dict(inherited)
    for place, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name == "env":
            environment = _of_env(words[place + 1 :], environment)
        elif name in ("mpirun", "mpiexec"):
            for option, value in pairwise(words[place + 1 :]):
                variable, sign, text = value.partition("=")
                if option == "-x" and sign:
                    environment[variable] = Word.of(text)
    return environment


def _of_env(words: Sequence[str], inherited: Mapping[str, Word]) -> dict[str, Word]:
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
        elif sign and NAME.fullmatch(name):
            environment[name] = Word.of(value)
        elif not word.startswith("-"):
            break
    return environment
