"""`refuse_expanding_references`: refuses references that would multiply the size of a config.

OmegaConf resolves a reference (``${...}``) each time that it is used. A line ``a: ${b}${b}``
doubles the size of ``b``, so thirty such lines would make a gigabyte. So the sizes are computed
before OmegaConf resolves anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bridge.errors import RunConfigError
from bridge.preflight.origins import Origins

MAX_CHARACTERS = 2**20
"""The largest value with its references resolved. A usual run has a hundredth of it in total."""
MAX_REFERENCE_DEPTH = 100
"""The longest chain of references to references."""
TOO_LARGE = MAX_CHARACTERS + 1
"""The size of every value that is too large. Larger sizes are not distinguished."""
REFERENCE = re.compile(r"\$\{([^${}]*)\}")
KEY_READERS = ("oc.select", "oc.dict.values")
"""Resolvers of OmegaConf whose first argument is a key."""


def refuse_expanding_references(config: Mapping[str, Any], origins: Origins) -> None:
    """Refuse a config in which a value is too large after its references are resolved.

    Args:
        config: Plain data with references as text.
        origins: The source of each key.

    Raises:
        RunConfigError: A value is too large. The error names the first one.
    """
    sizes = _ExpandedSizes(config)
    path = sizes.find_too_large("", config)
    if path is None:
        return
    rule = "cannot be resolved: references that multiply are refused"
    raise RunConfigError(f"{path}: {rule} ({origins.get_origin(path)}). Correct the reference.")


class _ExpandedSizes:
    """The sizes of a config's values in characters, after their references are resolved."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.size_at: dict[str, int] = {}
        """Key -> the size that was computed already."""

    def find_too_large(self, path: str, value: Any) -> str | None:
        """Return the key of the first text at or below a key that is too large, or None."""
        if not isinstance(value, dict | list):
            if self.compute_size(path, value, 0) > MAX_CHARACTERS:
                return path
            return None
        for key, inner in _get_items(value).items():
            too_large = self.find_too_large(f"{path}.{key}".lstrip("."), inner)
            if too_large is not None:
                return too_large
        return None

    def compute_size(self, path: str, value: Any, depth: int) -> int:
        """Return the size of a value.

        Args:
            path: The key of the value.
            depth: The number of references that led to it.
        """
        if path in self.size_at:
            return self.size_at[path]
        # If the value is met again before its size is computed, its references are circular.
        self.size_at[path] = TOO_LARGE
        size = 1
        if isinstance(value, dict | list):
            for key, inner in _get_items(value).items():
                size += self.compute_size(f"{path}.{key}", inner, depth)
        elif isinstance(value, str):
            size += len(value)
            for reference in REFERENCE.findall(value):
                size += self.compute_reference_size(path, reference, depth)
        self.size_at[path] = min(size, TOO_LARGE)
        return self.size_at[path]

    def compute_reference_size(self, path: str, reference: str, depth: int) -> int:
        """Return the size of the value that a reference names, or 0 if the config has no such key.

        Args:
            path: The key of the text with the reference.
            reference: The text between the braces.
            depth: The number of references that led to the text.
        """
        resolver, colon, argument = reference.partition(":")
        key = reference.strip()
        if colon and resolver == "hydra":
            key = f"hydra.{argument}"
        elif colon and resolver in KEY_READERS:
            key = argument.partition(",")[0].strip()
        elif colon:
            return 0
        if depth >= MAX_REFERENCE_DEPTH:
            return TOO_LARGE
        absolute = _resolve_key(key, path)
        value: Any = self.config
        for part in absolute.split("."):
            inner = _get_items(value)
            if part not in inner:
                return 0
            value = inner[part]
        return self.compute_size(absolute, value, depth + 1)


def _get_items(value: Any) -> dict[str, Any]:
    """Return the values of a mapping or a list by their keys as text. Other values have none."""
    if isinstance(value, dict):
        return {str(key): inner for key, inner in value.items()}
    if isinstance(value, list):
        return {str(index): inner for index, inner in enumerate(value)}
    return {}


def _resolve_key(key: str, path: str) -> str:
    """Return the absolute key that a reference names.

    ``a[0]`` is ``a.0``. One leading dot means the mapping of the reference, two its parent, and so
    on.

    Args:
        key: The key in the reference.
        path: The key of the text with the reference.
    """
    if key.startswith("["):
        dotted = key[1:].replace("]", "")
    else:
        dotted = key.replace("[", ".").replace("]", "")
    name = dotted.lstrip(".")
    dot_count = len(dotted) - len(name)
    if dot_count == 0:
        return name
    return ".".join([*path.split(".")[:-dot_count], name])
