"""The recipe names that ask for a choice: auto, auto:fp8, auto:fastest, auto:stable."""

from __future__ import annotations

__all__ = ["is_auto"]


def is_auto(name: object) -> bool:
    """Return whether a recipe's name asks for a choice."""
    return isinstance(name, str) and name.partition(":")[0].strip().lower() == "auto"
