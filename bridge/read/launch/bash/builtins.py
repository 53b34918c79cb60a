"""`Builtins`: the commands of bash that change variables and functions.

They are `unset`, `read`, `mapfile`, `printf -v`, `getopts`, `let`, `set` and `shift`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bridge.read.launch.bash.shell import NAME_PATTERN, Shell, find_list_index
from bridge.read.launch.shell_word import UNKNOWN_PATTERN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

PRINTF_FIELD_PATTERN = re.compile(r"%[sd]")
"""The fields of a format of `printf` that are filled."""
ARRAY_ELEMENT_PATTERN = re.compile(r"([A-Za-z_]\w*)\[([^\]]+)\]")
OPTIONS_WITH_VALUE = {"read": "adinNptu", "mapfile": "dnOsuCc", "readarray": "dnOsuCc"}
"""Command -> its options that a value follows."""


class Builtins(Shell):
    """A shell with its built-in commands."""

    def __init__(self, stated: Mapping[str, str]) -> None:
        super().__init__(stated)
        self.builtins: dict[str, Callable[[list[str]], None]] = {
            "unset": self._unset,
            "read": self._read_input,
            "mapfile": self._read_input,
            "readarray": self._read_input,
            "printf": self._printf,
            "getopts": lambda words: self._forget_all([*words[2:3], "OPTARG", "OPTIND"]),
            "let": lambda words: self.forget_computed(" , ".join(words[1:])),
            "set": self._set_options,
            "shift": self._shift,
        }

    def _unset(self, words: list[str]) -> None:
        """Read `unset`, of variables, elements and functions."""
        options = "".join(word for word in words[1:] if word.startswith("-"))
        for word in words[1:]:
            element = ARRAY_ELEMENT_PATTERN.fullmatch(word)
            if word.startswith("-"):
                continue
            if "f" in options:
                self.functions.pop(word, None)
            elif element is not None:
                self.forget(element[1])
            elif UNKNOWN_PATTERN.search(word):
                continue
            elif word not in self.values and word in self.functions and "v" not in options:
                self.functions.pop(word)
            else:
                self.values[word] = {}
                if self._is_local_of_a_caller(word):  # the variable that it hides comes back
                    self.forget(word)
                self.exported.pop(word, None)

    def _is_local_of_a_caller(self, name: str) -> bool:
        """Return whether a variable is local to a function around the innermost one."""
        is_local_there = any(name in frame for frame in self.frames[:-1])
        return is_local_there and name not in self.frames[-1]

    def _read_input(self, words: list[str]) -> None:
        """Make the variables unknown that `read` and `mapfile` set."""
        options, names = parse_short_options(words[1:], OPTIONS_WITH_VALUE[words[0]])
        if words[0] == "read":
            arrays = options.get("a", [])
            self._forget_all([*names, *arrays] or ["REPLY"])
        else:
            self._forget_all(names[:1] or ["MAPFILE"])

    def _printf(self, words: list[str]) -> None:
        """Read `printf -v NAME FORMAT WORD...` of known words, with `%s` and `%d`."""
        if words[1:2] != ["-v"] or len(words) < 3:
            return
        name = words[2]
        text = "".join(words[3:4])
        fillings = words[4:]
        has_other_signs = bool({"%", "\\"}.intersection(PRINTF_FIELD_PATTERN.sub("", text)))
        is_plain = len(PRINTF_FIELD_PATTERN.findall(text)) == len(fillings) and not has_other_signs
        is_unknown = any(map(UNKNOWN_PATTERN.search, [text, *fillings]))
        if NAME_PATTERN.fullmatch(name) and is_plain and not is_unknown:
            values = iter(fillings)
            self.set(name, [PRINTF_FIELD_PATTERN.sub(lambda _: next(values), text)])
        else:
            self._forget_all([name])

    def _forget_all(self, names: Iterable[str]) -> None:
        """Make variables, or the arrays of elements, unknown."""
        for name in names:
            if NAME_PATTERN.fullmatch(name):
                self.forget(name)
            elif ARRAY_ELEMENT_PATTERN.fullmatch(name):
                self.forget(name.partition("[")[0])

    def _set_options(self, words: list[str]) -> None:
        """Read `set -- a b` and `set -a`.

        The first sets the positional parameters, the second exports each variable that is set
        later.
        """
        for place, word in enumerate(words[1:], 1):
            before = words[place - 1]
            is_option = word[:1] in ("-", "+") and word not in ("-", "--")
            is_name = re.fullmatch(r"[-+]\w*o\w*", before) is not None
            if word == "--":
                self.set_positional(words[place + 1 :])
                return
            if not (is_option or is_name):
                self.set_positional(words[place:])
                return
            if word == "allexport":
                self.is_all_exported = before.startswith("-")
            elif re.fullmatch(r"[-+]\w*a\w*", word):
                self.is_all_exported = word.startswith("-")

    def _shift(self, words: list[str]) -> None:
        """Read `shift`, which moves the positional parameters."""
        count = 1
        if words[1:]:
            if not words[1].isdigit():
                for name in self.positional():
                    self.values.pop(name)
                return
            count = int(words[1])
        if "@" in self.values:
            parameters = self.get_elements("@")
            if count <= len(parameters):
                first = min(count, find_list_index(parameters))
                self.set_positional(parameters[first:])
        else:
            self._shift_stated(count)

    def _shift_stated(self, count: int) -> None:
        """Move the positional parameters that are stated from outside."""
        stated: dict[int, dict[int, str]] = {}
        for name in [*self.values]:
            if name.isdigit():
                stated[int(name)] = self.values.pop(name)
        for place, elements in stated.items():
            if place > count:
                self.values[str(place - count)] = elements


def parse_short_options(
    words: Sequence[str], with_value: str
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the one-letter options of a command with their values, and the words behind them."""
    options: dict[str, list[str]] = {}
    for index, word in enumerate(words):
        if not word.startswith("-") or word == "-":
            return options, list(words[index:])
        if word == "--":
            return options, list(words[index + 1 :])
        for at, letter in enumerate(word[1:], 1):
            if letter not in with_value:
                options.setdefault(letter, [])
                continue
            if word[at + 1 :]:
                options[letter] = [word[at + 1 :]]
                break
            options[letter] = list(words[index + 1 : index + 2])
            later_options, operands = parse_short_options(words[index + 2 :], with_value)
            options.update(later_options)
            return options, operands
    return options, []


def variable_read_whole(words: Sequence[str]) -> str | None:
    """Return the variable of `read -d '' NAME`, which takes all of its input; None for other commands."""
    options, names = parse_short_options(words[1:], OPTIONS_WITH_VALUE["read"])
    if words[:1] != ["read"] or options.get("d") != [""]:
        return None
    if len(names) != 1 or NAME_PATTERN.fullmatch(names[0]) is None:
        return None
    return names[0]
