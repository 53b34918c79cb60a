"""What the names of a file's fields say: the release of Megatron Core it is of, and those that are its framework's own.

`framework_fields.json` is written by ``scripts/write_framework_fields.py`` from the sources of the releases that it
names. Such a field is no misspelt one of Megatron's.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge.preflight.file_reading import INSTALLED_FOR_FILE, reason_of_installed
from bridge.rules.facts.near_names import nearest_fields
from bridge.target.fields import FIELDS, known_releases
from bridge.target.versions import Version, installed


def own_fields(
    framework: str, classes: Sequence[str], names: Iterable[str], role: str
) -> list[str]:
    """Return the names that are fields of a framework's classes alone; of a class that is not known here, all others.

    A name that is neither is left to the check of misspelt fields.
    """
    others = [name for name in names if name not in FIELDS[role]]
    table = _classes(framework)
    if any(one not in table for one in classes if not one.startswith("megatron.core.")):
        return others
    known = fields_of(framework, classes)
    return [name for name in others if name in known]


def fields_of(framework: str, classes: Sequence[str]) -> frozenset[str]:
    """Return the fields that a framework's classes have and Megatron Core's do not, none of a class not known here."""
    table = _classes(framework)
    return frozenset[str]().union(*(table.get(one, ()) for one in classes))


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
def _tables() -> Any:
    return json.loads(Path(__file__).with_name("framework_fields.json").read_text(encoding="utf-8"))


@functools.cache
def _classes(framework: str) -> dict[str, frozenset[str]]:
    """Return import path of a class -> the fields that it has and Megatron Core's classes do not."""
    return {
        name: frozenset(row["fields"])
        for row in _tables()[framework]["configs"]
        for name in row["classes"]
    }


def release_of(
    sections: Mapping[str, Mapping[str, Any]], *, is_whole: bool
) -> tuple[Version | None, str]:
    """Return the release that a file's fields of Megatron point to, and why it is assumed, as a clause.

    Args:
        sections: model, optimizer and ddp as the file has them.
        is_whole: The framework saved every field of its release. A file that somebody wrote has a few of them, and says
            only from which release on it can be: it is then of the installed release, where that is a later one.
    """
    releases = known_releases()
    newest, field = 0, ""
    for role, fields in sections.items():
        for name in fields:
            row = FIELDS.get(role, {}).get(name)
            if row is None or row.has is None:
                continue
            first = next(
                (place for place, release in enumerate(releases) if row.has.holds(release)), 0
            )
            if first > newest:
                newest, field = first, f"{role}.{name}"
    here = installed("mcore")
    if not is_whole and (here is None or here >= releases[newest]):
        return here, reason_of_installed(INSTALLED_FOR_FILE)
    if newest:
        return releases[
            newest
        ], f"{field} stands in the file, and {releases[newest - 1]} does not have it"
    return releases[0], "the file has every field of Megatron, and none that came later"
