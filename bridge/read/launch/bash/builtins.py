"""`Builtins`: the built-in commands of bash that change variables and functions.

They are `unset`, `read`, `mapfile`, `printf -v`, `getopts`, `let`, `set` and `shift`. A variable
whose new value only the run knows becomes open, so that no old value is used after it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bridge.read.launch.bash.shell import NAME_PATTERN, Shell, find_list_index
from bridge.read.launch.shell_word import OPEN_PIECE_PATTERN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

PRINTF_FIELD_PATTERN = re.compile(r"%[sd]")
"""The fields of a `printf` format that are filled in. A format with another field is not read."""
ARRAY_ELEMENT_PATTERN = re.compile(r"([A-Za-z_]\w*)\[([^\]]+)\]")
OPTIONS_WITH_VALUE = {"read": "adinNptu", "mapfile": "dnOsuCc", "readarray": "dnOsuCc"}
"""Command -> the letters of its options that take a value."""


class Builtins(Shell):
    """A shell with its built-in commands: `self.builtins[name](words)` follows one of them."""

    def __init__(self, stated: Mapping[str, str]) -> None:
        super().__init__(stated)
        self.builtins: dict[str, Callable[[list[str]], None]] = {
            "unset": self._unset,
            "read": self._read_input,
            "mapfile": self._read_input,
            "readarray": self._read_input,
            "printf": self._printf,
            "getopts": self._getopts,
            "let": self._let,
            "set": self._set_options,
            "shift": self._shift,
        }

    def _unset(self, words: list[str]) -> None:
        """Follow `unset` of variables, elements and functions."""
        options = "".join(word for word in words[1:] if word.startswith("-"))
        for word in words[1:]:
            element = ARRAY_ELEMENT_PATTERN.fullmatch(word)
            if word.startswith("-"):
                continue
            if "f" in options:
                self.functions.pop(word, None)
            elif element is not None:
                self.forget(element[1])
            elif OPEN_PIECE_PATTERN.search(word):
                continue
            elif word not in self.values and word in self.functions and "v" not in options:
                self.functions.pop(word)
            else:
                self._unset_variable(word)

    def _unset_variable(self, name: str) -> None:
        """Unset a variable.

        If it is local to a caller, bash shows the variable that it hid. Which one that is depends
        on all callers, so the variable becomes open.
        """
        self.values[name] = {}
        if self._is_local_of_a_caller(name):
            self.forget(name)
        self.exported.pop(name, None)

    def _is_local_of_a_caller(self, name: str) -> bool:
        """Return whether a variable is local to a function around the innermost one."""
        is_local_there = any(name in frame for frame in self.frames[:-1])
        return is_local_there and name not in self.frames[-1]

    def _getopts(self, words: list[str]) -> None:
        """Make the variables open that `getopts OPTIONS NAME` sets."""
        self._forget_all([*words[2:3], "OPTARG", "OPTIND"])

    def _let(self, words: list[str]) -> None:
        """Make the variables open that `let EXPRESSION...` changes."""
        self.forget_computed(" , ".join(words[1:]))

    def _read_input(self, words: list[str]) -> None:
        """Make the variables open that `read`, `mapfile` and `readarray` set."""
        options, names = parse_short_options(words[1:], OPTIONS_WITH_VALUE[words[0]])
        if words[0] == "read":
            arrays = options.get("a", [])
            self._forget_all([*names, *arrays] or ["REPLY"])
        else:
            self._forget_all(names[:1] or ["MAPFILE"])

    def read_text(self, words: list[str], text: str, separators: str) -> None:
        """Set the variables of `read NAME...` or `read -a NAME` to the fields of a text.

        Args:
            words: The words of the command.
            text: The first line of its input.
            separators: The value of IFS: blanks alone, or a single other character.
        """
        options, names = parse_short_options(words[1:], OPTIONS_WITH_VALUE["read"])
        if not set(options) <= {"a", "r"} or not all(map(NAME_PATTERN.fullmatch, names)):
            return
        for array in options.get("a", []):
            self.set_array(array, split_fields(text, separators, 0))
        if "a" in options or not names:
            return
        fields = split_fields(text, separators, len(names))
        fields += [""] * (len(names) - len(fields))
        for name, field in zip(names, fields, strict=True):
            self.set_text(name, field)

    def _printf(self, words: list[str]) -> None:
        """Follow `printf -v NAME FORMAT ARGUMENT...` with the fields `%s` and `%d`."""
        if words[1:2] != ["-v"] or len(words) < 3:
            return  # without -v it prints, and changes nothing
        name = words[2]
        template = "".join(words[3:4])
        arguments = words[4:]
        text_between = PRINTF_FIELD_PATTERN.sub("", template)
        has_other_signs = "%" in text_between or "\\" in text_between
        # With more arguments than fields bash repeats the format, which no script needs here.
        has_a_field_each = len(PRINTF_FIELD_PATTERN.findall(template)) == len(arguments)
        is_open = any(map(OPEN_PIECE_PATTERN.search, [template, *arguments]))
        is_plain = has_a_field_each and not has_other_signs and not is_open
        if NAME_PATTERN.fullmatch(name) and is_plain:
            remaining = iter(arguments)
            self.set_text(name, PRINTF_FIELD_PATTERN.sub(lambda _: next(remaining), template))
        else:
            self._forget_all([name])

    def _forget_all(self, names: Iterable[str]) -> None:
        """Make variables open; for an element `A[0]`, its array."""
        for name in names:
            if NAME_PATTERN.fullmatch(name):
                self.forget(name)
            elif ARRAY_ELEMENT_PATTERN.fullmatch(name):
                self.forget(name.partition("[")[0])

    def _set_options(self, words: list[str]) -> None:
        """Follow `set -- a b`, which sets the positional parameters, and `set -a`.

        After `set -a`, or `set -o allexport`, each variable that is set is exported too.
        """
        for index, word in enumerate(words[1:], 1):
            previous = words[index - 1]
            is_option = word[:1] in ("-", "+") and word not in ("-", "--")
            is_option_name = re.fullmatch(r"[-+]\w*o\w*", previous) is not None
            if word == "--":
                self.set_positional(words[index + 1 :])
                return
            if not (is_option or is_option_name):
                self.set_positional(words[index:])
                return
            if word == "allexport":
                self.is_all_exported = previous.startswith("-")
            elif re.fullmatch(r"[-+]\w*a\w*", word):
                self.is_all_exported = word.startswith("-")

    def _shift(self, words: list[str]) -> None:
        """Follow `shift [COUNT]`, which removes the first positional parameters.

        With a count that only the run knows no parameter is known. As in bash, a count above their
        number removes none.
        """
        count = 1
        if words[1:]:
            if not words[1].isdigit():
                for name in self.get_positional():
                    self.values.pop(name)
                return
            count = int(words[1])
        if "@" not in self.values:
            self._shift_stated(count)
            return
        parameters = self.get_elements("@")
        if count <= len(parameters):
            # A parameter that may be any number of words cannot be counted, so it stays the first.
            first_kept = min(count, find_list_index(parameters))
            self.set_positional(parameters[first_kept:])

    def _shift_stated(self, count: int) -> None:
        """Move the single parameters (`1`, `2`, ...) that the caller of the reader states."""
        stated: dict[int, dict[int, str]] = {}
        for name in [*self.values]:
            if name.isdigit():
                stated[int(name)] = self.values.pop(name)
        for number, elements in stated.items():
            if number > count:
                self.values[str(number - count)] = elements


def parse_short_options(
    words: Sequence[str], letters_with_value: str
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the one-letter options of a command, and its operands after them.

    Args:
        words: The words after the command.
        letters_with_value: The options that take a value, in the same word or in the next one.

    Returns:
        Letter -> its value in a list, which is empty for an option without a value; and the
        operands.
    """
    options: dict[str, list[str]] = {}
    for index, word in enumerate(words):
        if not word.startswith("-") or word == "-":
            return options, list(words[index:])
        if word == "--":
            return options, list(words[index + 1 :])
        for position, letter in enumerate(word[1:], 1):
            if letter not in letters_with_value:
                options.setdefault(letter, [])
                continue
            value_in_word = word[position + 1 :]
            if value_in_word:
                options[letter] = [value_in_word]
                break
            options[letter] = list(words[index + 1 : index + 2])
            later = parse_short_options(words[index + 2 :], letters_with_value)
            options.update(later[0])
            return options, later[1]
    return options, []


def split_fields(text: str, separators: str, count: int) -> list[str]:
    """Return the first fields of a text, as `read` with this IFS splits it.

    Args:
        separators: Blanks alone, or a single other character.
        count: The most fields; the last one is the rest of the text. 0: every field.
    """
    if separators.isspace():
        return text.strip().split(None, count - 1)
    fields = text.split(separators, count - 1)
    if count == 0 and fields[-1] == "":
        return fields[:-1]
    return fields


def find_whole_read_variable(words: Sequence[str]) -> str | None:
    """Return the variable of `read -d '' NAME`, which takes all of its input; None for other commands."""
    options, names = parse_short_options(words[1:], OPTIONS_WITH_VALUE["read"])
    if words[:1] != ["read"] or options.get("d") != [""]:
        return None
    if len(names) != 1 or NAME_PATTERN.fullmatch(names[0]) is None:
        return None
    return names[0]
