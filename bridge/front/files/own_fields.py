"""The fields that a framework's config classes add to those of Megatron Core.

`framework_fields.json` is written by ``scripts/write_framework_fields.py`` from the sources of the releases that it
names. Such a field is no misspelt one of Megatron's.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.rules.fields import FIELDS
from bridge.rules.topics.names import nearest_fields

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


def own_fields(framework: str, classes: Sequence[str], names: Iterable[str], role: str) -> list[str]:
    """Return the names that are fields of a framework's classes alone; of a class that is not known here, all others.

    A name that is neither is left to the check of misspelt fields.
    """
    others = [name for name in names if name not in FIELDS[role]]
    table = _classes(framework)
    if any(one not in table for one in classes if not one.startswith("megatron.core.")):
        return others
    known = frozenset[str]().union(*(table.get(one, ()) for one in classes))
    return [name for name in others if name in known]


def newer_fields(names: Collection[str], role: str) -> list[str]:
    """Return the names that no known release of Megatron Core has, in a section with every field of its own release.

    A name is a misspelt one where the field that it resembles is absent, which such a section never leaves out.
    """
    others = [name for name in names if name not in FIELDS[role]]
    return [name for name in others if all(near in names for near in nearest_fields(role, name))]


def has_text(framework: str, name: str) -> bool:
    """Return whether a class of a model is one with the layers of a language model."""
    return name not in _tables()[framework]["without_text"]


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    path = Path(__file__).parent / "framework_fields.json"
    found: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


@functools.cache
def _classes(framework: str) -> dict[str, frozenset[str]]:
    """Return import path of a class -> the fields that it has and Megatron Core's classes do not."""
    rows = _tables()[framework]["configs"]
    return {name: frozenset(row["fields"]) for row in rows for name in row["classes"]}
