"""The facts of ``--context``, which no file states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bridge.errors import RunConfigError


def parse_context(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the facts of arguments ``KEY=VALUE``.

    Raises:
        RunConfigError: An argument has another form, or two arguments have the same key.
    """
    facts: dict[str, Any] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not key:
            raise RunConfigError(
                f"--context: must be KEY=VALUE, got {argument!r}. Write auto=bf16, for example."
            )
        if key in facts:
            rule = f"{key} must be given once, got it again as {value!r}"
            raise RunConfigError(f"--context: {rule}. Keep one of the two.")
        facts[key] = _parse_value(key, value)
    return facts


def _parse_value(key: str, text: str) -> Any:
    """Return a value as a number, a switch, a list or a mapping, or else the text itself."""
    import yaml

    if key.endswith("version"):  # YAML would read 2.10 as the number 2.1
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, bool | int | float | dict | list):
        return value
    return text
