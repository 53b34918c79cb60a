"""`CommandWords`: the words of a command line as options, overrides and the rest."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

from bridge.interop.launch.variables import is_unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


OVERRIDE = re.compile(r"(?:\+{0,2}|~)([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
NUMBER = re.compile(r"-\d|-\.\d")
HOLDS_OPTIONS = re.compile(r"ARG|OPTS|OPTION|FLAG|EXTRA|[$]{?[@*]", re.IGNORECASE)
"""Names of variables that hold options rather than the value of one."""


class CommandWords:
    """The words of a command line.

    Args:
        words: As the program gets them; unknown pieces are marked.
        shown: Turns the marks of a word back into what was written.
    """

    def __init__(self, words: Iterable[str], shown: Callable[[str], str]) -> None:
        self.shown = shown
        self.options: dict[str, str | bool] = {}
        """`--some-name value`, by `some_name`; True without a value. The last one counts."""
        self.overrides: dict[str, str] = {}
        """`key.inner=value`, without Hydra's `+`."""
        self.rest: list[str] = []
        self.undecided: dict[str, str] = {}
        """Option or override whose value only the run decides -> the value as it was written."""
        self.loose: list[str] = []
        """Words that only the run decides and that may hold any option."""
        self.written: dict[str, str] = {}
        """Option -> the option as it was written."""
        waiting = ""
        for word in words:
            if word.startswith("-") and not NUMBER.match(word) and word.strip("-"):
                waiting = self._option(word)
            elif waiting:
                self._value(self.options, waiting, word)
                waiting = ""
            else:
                self._other(word)

    @property
    def known(self) -> list[str]:
        """The options and their values without those that only the run decides."""
        pairs = ((self.written[key], value) for key, value in self.options.items())
        return [name if value is True else f"{name}={value}" for name, value in pairs]

    def _option(self, word: str) -> str:
        """Note an option; return its name where a value may follow."""
        name, equals, value = word.partition("=")
        if is_unknown(name):
            self.loose.append(self.shown(word))
            return ""
        key = name.lstrip("-").replace("-", "_")
        self.written[key], self.options[key] = name, True
        self.undecided.pop(key, None)
        if equals:
            self._value(self.options, key, value)
        return "" if equals else key

    def _value(self, group: dict[str, Any], key: str, value: str) -> None:
        """Note the value of an option or override."""
        if is_unknown(value) and group is self.options and HOLDS_OPTIONS.search(self.shown(value)):
            self.loose.append(self.shown(value))
        elif is_unknown(value):
            self.undecided[key] = self.shown(value)
            group.pop(key, None)
        else:
            self.undecided.pop(key, None)
            group[key] = value

    def _other(self, word: str) -> None:
        found = OVERRIDE.fullmatch(word)
        if found is not None and not is_unknown(found[1]):
            if word.startswith("~"):
                self.overrides.pop(found[1], None)
            else:
                self._value(self.overrides, found[1], found[2])
        elif is_unknown(word):
            self.loose.append(self.shown(word))
        else:
            self.rest.append(word)


def nested(flat: Mapping[str, str | bool]) -> dict[str, Any]:
    """Return dotted keys as mappings within mappings, values as YAML reads them; a key below a value goes over it."""
    found: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = re.split(r"[./]", key)
        inner = found
        for name in path:
            if not isinstance(inner.get(name), dict):
                inner[name] = {}
            inner = inner[name]
        inner[last] = _typed(value)
    return found


def _typed(value: Any) -> Any:
    """Return a text as YAML reads it, as it is where that fails."""
    try:
        return yaml.safe_load(value) if isinstance(value, str) else value
    except yaml.YAMLError:
        return value
