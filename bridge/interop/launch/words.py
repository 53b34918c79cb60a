"""`CommandWords`: the words of a command line as options, overrides and the rest."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from bridge.interop.launch.values import is_unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["CommandWords", "nested", "typed"]

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
        self.options: dict[str, str | bool] = {}
        """`--some-name value`, by `some_name`; True without a value. The last one counts."""
        self.overrides: dict[str, str] = {}
        """`key.inner=value`, without Hydra's `+`."""
        self.rest: list[str] = []
        self.undecided: dict[str, str] = {}
        """Option or override whose value only the run decides -> the value as it was written."""
        self.loose: list[str] = []
        """Words that only the run decides and that may hold any option."""
        self.known: list[str] = []
        """The words without those that only the run decides."""
        self.written: dict[str, str] = {}
        """Option -> the option as it was written."""
        waiting = ""
        for word in words:
            if word.startswith("-") and not NUMBER.match(word) and len(word.lstrip("-")) > 0:
                waiting = self._option(word, shown)
            elif waiting:
                self._value(waiting, word, shown)
                waiting = ""
            else:
                self._other(word, shown)

    def _option(self, word: str, shown: Callable[[str], str]) -> str:
        """Note an option; return its name where a value may follow."""
        name, equals, value = word.lstrip("-").partition("=")
        key = name.replace("-", "_")
        if is_unknown(name):
            self.loose.append(shown(word))
            return ""
        self.written[key] = word.partition("=")[0]
        self.undecided.pop(key, None)
        if equals:
            self._value(key, value, shown)
            return ""
        self.options[key] = True
        self.known.append(word)
        return key

    def _value(self, key: str, value: str, shown: Callable[[str], str]) -> None:
        if is_unknown(value) and HOLDS_OPTIONS.search(shown(value)):
            self.loose.append(shown(value))
            return
        if is_unknown(value):
            self.undecided[key] = shown(value)
            self.options.pop(key, None)
            if self.known[-1:] == [self.written[key]]:
                self.known.pop()
            return
        self.options[key] = value
        if self.known[-1:] == [self.written[key]]:
            self.known.append(value)
        else:
            self.known.append(f"{self.written[key]}={value}")

    def _other(self, word: str, shown: Callable[[str], str]) -> None:
        found = OVERRIDE.fullmatch(word)
        if found is not None and not is_unknown(found[1]):
            key, value = found[1], found[2]
            if is_unknown(value):
                self.undecided[key] = shown(value)
                self.overrides.pop(key, None)
            elif word.startswith("~"):
                self.overrides.pop(key, None)
            else:
                self.undecided.pop(key, None)
                self.overrides[key] = value
        elif is_unknown(word):
            self.loose.append(shown(word))
        else:
            self.rest.append(word)
            self.known.append(word)


def typed(value: str | bool) -> Any:
    """Return a value as YAML reads it, a text where that fails."""
    import yaml

    if isinstance(value, bool):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Return dotted keys as mappings within mappings; a key below a plain value goes over it."""
    found: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = re.split(r"[./]", key)
        inner = found
        for name in path:
            if not isinstance(inner.get(name), dict):
                inner[name] = {}
            inner = inner[name]
        inner[last] = value
    return found
