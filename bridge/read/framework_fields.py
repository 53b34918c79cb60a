"""Fields that the classes of a framework have and Megatron Core's classes do not.

    own_fields(MEGATRON_BRIDGE, ["megatron.bridge...GPTModelProvider"], ["vocab_size"], "model")
    # ["vocab_size"]: no misspelt field of Megatron's

`framework_fields.json` is written by ``scripts/write_framework_fields.py`` from the sources of the
releases that it names.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from bridge.rules.facts.near_names import find_near_fields
from bridge.target.fields import OWNER_FIELDS

MEGATRON_CORE_PACKAGE = "megatron.core."


def list_framework_fields(
    framework: str, classes: Sequence[str], names: Iterable[str], owner_name: str
) -> list[str]:
    """Return those names in a section that are fields of the framework alone.

    A name that is neither such a field nor one of Megatron's is left to the check of misspelt
    fields. Where a class is not known here, it may have any field.

    Args:
        framework: Its name.
        classes: Import paths of the classes that the section is made with.
        names: The names in the section.
        owner_name: The section: model, optimizer or ddp.
    """
    others = [name for name in names if name not in OWNER_FIELDS[owner_name]]
    table = _get_fields_by_class(framework)
    for path in classes:
        if path not in table and not path.startswith(MEGATRON_CORE_PACKAGE):
            return others
    known = get_framework_fields(framework, classes)
    return [name for name in others if name in known]


def get_framework_fields(framework: str, classes: Sequence[str]) -> frozenset[str]:
    """Return the fields that classes of a framework have and Megatron Core's classes do not.

    A class that is not known here counts as one without such fields.
    """
    table = _get_fields_by_class(framework)
    fields: set[str] = set()
    for path in classes:
        fields.update(table.get(path, ()))
    return frozenset(fields)


def list_newer_fields(names: Collection[str], owner_name: str) -> list[str]:
    """Return the names in a section that no known release of Megatron Core has.

    The section has every field of its release. So a name is a misspelt one where the field that it
    resembles is absent.
    """
    newer: list[str] = []
    for name in names:
        if name not in OWNER_FIELDS[owner_name] and all(
            near in names for near in find_near_fields(owner_name, name)
        ):
            newer.append(name)
    return newer


def has_language_model(framework: str, name: str) -> bool:
    """Return whether the class of a model has the layers of a language model."""
    return name not in _load_tables()[framework]["without_text"]


@functools.cache
def _load_tables() -> Any:
    return json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


@functools.cache
def _get_fields_by_class(framework: str) -> dict[str, frozenset[str]]:
    """Return import path of a class -> the fields that it has and Megatron Core's classes do not."""
    table: dict[str, frozenset[str]] = {}
    for row in _load_tables()[framework]["configs"]:
        for path in row["classes"]:
            table[path] = frozenset(row["fields"])
    return table
