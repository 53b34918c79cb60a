"""Words of a command line as options and overrides, whatever program takes them."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from bridge.read.launch.launches import ROWS
from bridge.read.launch.word import Word

HOLDS_OPTIONS = re.compile(ROWS["holds options"])
OVERRIDE = re.compile(r"(?:\+{0,2}|~)([A-Za-z_][\w./@-]*)")
LONGEST = 4_096
"""Characters of a value that is read as YAML."""
NUMBER = re.compile(r"-\d|-\.\d")


class CommandWords:
    """The words of a command line as options, overrides and others."""

    def __init__(self, words: Iterable[Word]) -> None:
        self.options: dict[str, str | bool] = {}
        """`--some-name value`, by `some_name`; True without a value. The last one counts."""
        self.overrides: dict[str, str] = {}
        """`key.inner=value`, without Hydra's `+`."""
        self.undecided: dict[str, str] = {}
        """Option or override whose value only the run decides -> the value as it was written."""
        self.loose: list[str] = []
        """Words that only the run decides and that may hold any option."""
        self.written: dict[str, str] = {}
        waiting = ""
        for word in words:
            if word.startswith("-") and not NUMBER.match(word) and word.strip("-"):
                waiting = self._option(word)
            elif waiting:
                self._value(self.options, waiting, word)
                waiting = ""
            else:
                self._other(word)

    def _option(self, word: Word) -> str:
        """Note an option; return its name where a value may follow."""
        name, value = word.option()
        if name.is_unknown:
            self.loose.append(str(word))
            return ""
        key = name.lstrip("-").replace("-", "_")
        self.written[key], self.options[key] = str(name), True
        self.undecided.pop(key, None)
        if value is not None:
            self._value(self.options, key, value)
        return key if value is None else ""

    def _value(self, group: dict[str, Any], key: str, value: Word) -> None:
        if value.is_unknown and group is self.options and HOLDS_OPTIONS.search(value):
            self.loose.append(str(value))
        elif value.is_unknown:
            self.undecided[key] = str(value)
            group.pop(key, None)
        else:
            self.undecided.pop(key, None)
            group[key] = str(value)

    def _other(self, word: Word) -> None:
        name, value = word.option()
        found = OVERRIDE.fullmatch(name)
        if found is not None and value is not None and not name.is_unknown:
            if word.startswith("~"):
                self.overrides.pop(found[1], None)
            else:
                self._value(self.overrides, found[1], value)
        elif word.is_unknown:
            self.loose.append(str(word))


def nested(flat: Mapping[str, str | bool]) -> dict[str, Any]:
    """Return dotted keys as mappings within mappings, values as YAML reads them.

    A key below a value goes over it.
    """
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
    """Return a text as YAML reads it, as it is where that fails or it is longer than any setting."""
    if not isinstance(value, str) or len(value) > LONGEST:
        return value
    try:
        return yaml.safe_load(value)
    except (yaml.YAMLError, RecursionError):
        return value
