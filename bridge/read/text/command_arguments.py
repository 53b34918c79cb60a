"""`CommandArguments`: the options and overrides of a command line, for any program.

arguments = CommandArguments(map(ShellWord, ["--lr", "0.1", "--bf16", "model.fp8=hybrid"]))
arguments.options      # {"lr": "0.1", "bf16": True}
arguments.overrides    # {"model.fp8": "hybrid"}
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from bridge.read.launch.command_line_rows import COMMAND_LINE_ROWS
from bridge.read.launch.shell_word import ShellWord

OPTIONS_VARIABLE_PATTERN = re.compile(COMMAND_LINE_ROWS["holds options"])
"""A part of the name of a variable whose value has whole options, such as `$EXTRA_ARGS`."""
OVERRIDE_KEY_PATTERN = re.compile(r"(?:\+{0,2}|~)([A-Za-z_][\w./@-]*)")
"""The key of an override, after Hydra's sign (`+`, `++` or `~`)."""
MAX_VALUE_LENGTH = 4_096
"""The most characters of a value that is read as YAML."""
NEGATIVE_NUMBER_PATTERN = re.compile(r"-\d|-\.\d")
"""The beginning of a negative number. It is a value, although it begins like an option."""


class CommandArguments:
    """The options and overrides of a command line.

    Without the program's parser it is not known which options have a value. An argument after an
    option counts as its value, unless the argument is an option itself.

    Args:
        words: The arguments after the name of the program.
    """

    def __init__(self, words: Iterable[ShellWord]) -> None:
        self.options: dict[str, str | bool] = {}
        """`some_name` of `--some-name value` -> the last value. True: the option has no value."""
        self.overrides: dict[str, str] = {}
        """`key.inner` of `key.inner=value`, without Hydra's `+` -> the value."""
        self.open_values: dict[str, str] = {}
        """Option or override whose value only the run decides -> the value as it is written."""
        self.open_words: list[str] = []
        """Arguments that only the run decides. Each may contain any options."""
        self.spellings: dict[str, str] = {}
        """`some_name` -> the option as it is written, `--some-name`."""
        option_before = ""
        for word in words:
            is_number = NEGATIVE_NUMBER_PATTERN.match(word) is not None
            if word.startswith("-") and not is_number and word.strip("-"):
                option_before = self._add_option(word)
            elif option_before:
                self._set_value(self.options, option_before, word)
                option_before = ""
            else:
                self._add_override(word)

    def _add_option(self, word: ShellWord) -> str:
        """Add an option. Return its name if the next argument may be its value, else ""."""
        name, value = word.split_option()
        if name.is_open:
            self.open_words.append(str(word))
            return ""
        key = name.lstrip("-").replace("-", "_")
        self.spellings[key] = str(name)
        self.options[key] = True
        self.open_values.pop(key, None)
        if value is None:
            return key
        self._set_value(self.options, key, value)
        return ""

    def _set_value(self, values: dict[str, Any], key: str, value: ShellWord) -> None:
        """Set the value of an option or an override.

        Args:
            values: `options` or `overrides`.
            key: The key in them.
            value: The value. A variable with options, as in `--bf16 $EXTRA_ARGS`, is not the value
                of the option before it.
        """
        is_option = values is self.options
        if value.is_open and is_option and OPTIONS_VARIABLE_PATTERN.search(value):
            self.open_words.append(str(value))
        elif value.is_open:
            self.open_values[key] = str(value)
            values.pop(key, None)
        else:
            self.open_values.pop(key, None)
            values[key] = str(value)

    def _add_override(self, word: ShellWord) -> None:
        """Add an override, or an argument that only the run decides. Others are ignored."""
        name, value = word.split_option()
        match = OVERRIDE_KEY_PATTERN.fullmatch(name)
        if match is not None and value is not None and not name.is_open:
            if word.startswith("~"):
                self.overrides.pop(match[1], None)
            else:
                self._set_value(self.overrides, match[1], value)
        elif word.is_open:
            self.open_words.append(str(word))


def nest_dotted_keys(flat: Mapping[str, str | bool]) -> dict[str, Any]:
    """Return dotted keys as nested mappings, with the values as YAML reads them.

    A value is replaced by the mapping of a key below it: `a=1 a.b=2` becomes `{"a": {"b": 2}}`.

    Args:
        flat: `key.inner` or `key/inner` -> its value as text.
    """
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, last = re.split(r"[./]", key)
        section = tree
        for name in sections:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        section[last] = _parse_yaml_value(value)
    return tree


def _parse_yaml_value(value: str | bool) -> Any:
    """Return a text as YAML reads it. A very long text, or text that is not YAML, is unchanged."""
    if not isinstance(value, str) or len(value) > MAX_VALUE_LENGTH:
        return value
    try:
        return yaml.safe_load(value)
    except (yaml.YAMLError, RecursionError):
        return value
