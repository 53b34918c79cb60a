"""References of a config (``${...}``) that multiply: counted before OmegaConf writes them out.

OmegaConf resolves a reference as often as it is named: thirty lines of ``a: ${b}${b}`` would make a
gigabyte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bridge.errors import RunConfigError
from bridge.preflight.origins import Origins

MAX_CHARACTERS = 2**20
"""Of a value with its references written out. A whole run has a hundredth of it."""
MAX_REFERENCE_DEPTH = 100
"""From a reference to a reference."""
TOO_LARGE = MAX_CHARACTERS + 1
REFERENCE = re.compile(r"\$\{([^${}]*)\}")
KEY_READERS = ("oc.select", "oc.dict.values")
"""Resolvers of OmegaConf whose argument is a key."""


def refuse_expanding_references(config: Mapping[str, Any], origins: Origins) -> None:
    """Raise RunConfigError with the first key whose value is too large.

    Values are measured with their references written out. `config` is plain data with its
    references as text.
    """
    sizes = _ExpandedSizes(config)
    path = sizes.find_too_large("", config)
    if path is None:
        return
    rule = "cannot be resolved: references that multiply are refused"
    raise RunConfigError(f"{path}: {rule} ({origins.get_origin(path)}). Correct the reference.")


class _ExpandedSizes:
    """The sizes of a config's values in characters, with every reference written out."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.known: dict[str, int] = {}

    def find_too_large(self, path: str, value: Any) -> str | None:
        """Return the first key of text that is too large."""
        if not isinstance(value, dict | list):
            if self.of(path, value, 0) > MAX_CHARACTERS:
                return path
            return None
        for key, inner in _get_items(value).items():
            too_large = self.find_too_large(f"{path}.{key}".lstrip("."), inner)
            if too_large is not None:
                return too_large
        return None

    def of(self, path: str, value: Any, steps: int) -> int:
        """Return the size of the value at `path`."""
        if path not in self.known:
            self.known[path] = TOO_LARGE  # where it is met again before its size is known: a circle
            size = 1
            if isinstance(value, dict | list):
                for key, inner in _get_items(value).items():
                    size += self.of(f"{path}.{key}", inner, steps)
            elif isinstance(value, str):
                size += len(value)
                for reference in REFERENCE.findall(value):
                    size += self.count_reference(path, reference, steps)
            self.known[path] = min(size, TOO_LARGE)
        return self.known[path]

    def count_reference(self, path: str, reference: str, steps: int) -> int:
        """Return the size of what a reference at `path` stands for.

        0 where that is no key of the config.
        """
        resolver, colon, argument = reference.partition(":")
        key = reference.strip()
        if colon and resolver == "hydra":
            key = f"hydra.{argument}"
        elif colon and resolver in KEY_READERS:
            key = argument.partition(",")[0].strip()
        elif colon:
            return 0
        if steps >= MAX_REFERENCE_DEPTH:
            return TOO_LARGE
        absolute = _resolve_key(key, path)
        value: Any = self.config
        for part in absolute.split("."):
            inner = _get_items(value)
            if part not in inner:
                return 0
            value = inner[part]
        return self.of(absolute, value, steps + 1)


def _get_items(value: Any) -> dict[str, Any]:
    """Return the values of a mapping or a list by their keys as text; none for another value."""
    if isinstance(value, dict):
        return {str(key): inner for key, inner in value.items()}
    if isinstance(value, list):
        return {str(index): inner for index, inner in enumerate(value)}
    return {}


def _resolve_key(key: str, path: str) -> str:
    """Return the key that a reference at `path` names.

    ``a[0]`` is ``a.0``, and a leading dot means the same mapping.
    """
    if key.startswith("["):
        dotted = key[1:].replace("]", "")
    else:
        dotted = key.replace("[", ".").replace("]", "")
    name = dotted.lstrip(".")
    dots = len(dotted) - len(name)
    if dots == 0:
        return name
    return ".".join([*path.split(".")[:-dots], name])
