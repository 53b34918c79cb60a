"""Fields that the classes of a framework have and Megatron Core's classes do not.

    list_framework_fields(
        MEGATRON_BRIDGE, ["megatron.bridge...GPTModelProvider"], ["vocab_size"], "model"
    )
    # ["vocab_size"]: it is no misspelt field of Megatron's

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
    """Return the names in a section that are fields of the framework and not of Megatron Core.

    A name that neither has is not returned: the check of misspelt fields reports it. A class that
    is not in the table may have any field, so that all names which Megatron Core lacks are
    returned.

    Args:
        framework: The name of the framework.
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


@functools.cache
def list_all_framework_fields(framework: str) -> frozenset[str]:
    """Return the fields that any class of a framework has and Megatron Core's classes do not."""
    fields: set[str] = set()
    for names in _get_fields_by_class(framework).values():
        fields |= names
    return frozenset(fields)


def list_newer_fields(names: Collection[str], owner_name: str) -> list[str]:
    """Return the fields in a section that came after every known release of Megatron Core.

    The section was saved with every field of its release. An unknown name is a misspelt one if the
    known field that it resembles is absent; otherwise it is a new field.
    """
    newer: list[str] = []
    for name in names:
        if name in OWNER_FIELDS[owner_name]:
            continue
        if all(near in names for near in find_near_fields(owner_name, name)):
            newer.append(name)
    return newer


def has_language_model(framework: str, name: str) -> bool:
    """Return whether a model has the layers of a language model.

    Args:
        framework: The name of the framework.
        name: The name of the model's class.
    """
    return name not in _load_tables()[framework]["without_text"]


@functools.cache
def _load_tables() -> Any:
    """Return the content of `framework_fields.json`: framework -> its classes and their fields."""
    return json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


@functools.cache
def _get_fields_by_class(framework: str) -> dict[str, frozenset[str]]:
    """Return import path of a class -> the fields that it has and Megatron Core's classes do not."""
    table: dict[str, frozenset[str]] = {}
    for row in _load_tables()[framework]["configs"]:
        for path in row["classes"]:
            table[path] = frozenset(row["fields"])
    return table
