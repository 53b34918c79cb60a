"""Words of a command line as options and overrides, whatever program takes them."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from bridge.read.launch.command_line_rows import COMMAND_LINE_ROWS
from bridge.read.launch.shell_word import ShellWord

OPTIONS_VARIABLE_PATTERN = re.compile(COMMAND_LINE_ROWS["holds options"])
OVERRIDE_KEY_PATTERN = re.compile(r"(?:\+{0,2}|~)([A-Za-z_][\w./@-]*)")
MAX_VALUE_LENGTH = 4_096
"""Characters of a value that is read as YAML."""
NEGATIVE_NUMBER_PATTERN = re.compile(r"-\d|-\.\d")


class CommandArguments:
    """The words of a command line as options, overrides and others."""

    def __init__(self, words: Iterable[ShellWord]) -> None:
        self.options: dict[str, str | bool] = {}
        """`some_name` of `--some-name value` -> the last value; True for an option without a value."""
        self.overrides: dict[str, str] = {}
        """`key.inner` of `key.inner=value`, without Hydra's `+` -> the value."""
        self.undecided: dict[str, str] = {}
        """Option or override whose value only the run decides -> the value as it is written."""
        self.loose: list[str] = []
        """Words that only the run decides and that may hold any option."""
        self.written: dict[str, str] = {}
        """`some_name` -> the option as it is written, `--some-name`."""
        waiting = ""
        for word in words:
            if word.startswith("-") and not NEGATIVE_NUMBER_PATTERN.match(word) and word.strip("-"):
                waiting = self._add_option(word)
            elif waiting:
                self._set_value(self.options, waiting, word)
                waiting = ""
            else:
                self._add_override(word)

    def _add_option(self, word: ShellWord) -> str:
        """Note an option; return its name where a value may follow."""
        name, value = word.option()
        if name.is_unknown:
            self.loose.append(str(word))
            return ""
        key = name.lstrip("-").replace("-", "_")
        self.written[key] = str(name)
        self.options[key] = True
        self.undecided.pop(key, None)
        if value is None:
            return key
        self._set_value(self.options, key, value)
        return ""

    def _set_value(self, group: dict[str, Any], key: str, value: ShellWord) -> None:
        """Note the value of an option or an override."""
        if value.is_unknown and group is self.options and OPTIONS_VARIABLE_PATTERN.search(value):
            self.loose.append(str(value))
        elif value.is_unknown:
            self.undecided[key] = str(value)
            group.pop(key, None)
        else:
            self.undecided.pop(key, None)
            group[key] = str(value)

    def _add_override(self, word: ShellWord) -> None:
        """Note an override, or a word that may hold any option."""
        name, value = word.option()
        match = OVERRIDE_KEY_PATTERN.fullmatch(name)
        if match is not None and value is not None and not name.is_unknown:
            if word.startswith("~"):
                self.overrides.pop(match[1], None)
            else:
                self._set_value(self.overrides, match[1], value)
        elif word.is_unknown:
            self.loose.append(str(word))


def nest_dotted_keys(flat: Mapping[str, str | bool]) -> dict[str, Any]:
    """Return dotted keys as mappings within mappings, with values as YAML reads them.

    A key below a value takes its place.
    """
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *blocks, last = re.split(r"[./]", key)
        block = tree
        for name in blocks:
            if not isinstance(block.get(name), dict):
                block[name] = {}
            block = block[name]
        block[last] = _parse_yaml_value(value)
    return tree


def _parse_yaml_value(value: Any) -> Any:
    """Return a text as YAML reads it; a text that is no YAML, or very long, stays as it is."""
    if not isinstance(value, str) or len(value) > MAX_VALUE_LENGTH:
        return value
    try:
        return yaml.safe_load(value)
    except (yaml.YAMLError, RecursionError):
        return value
