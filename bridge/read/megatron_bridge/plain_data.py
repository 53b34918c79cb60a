"""`convert_to_plain`: a value of a followed program as plain data, in the form of a saved run's YAML."""

from __future__ import annotations

from bridge.read.megatron_bridge.saved_container import TARGET_KEY
from bridge.read.megatron_bridge.values import (
    Class,
    Function,
    ImportedName,
    Object,
    Value,
    is_open,
    strip_late_clause,
)

PARTLY_OPEN = "of which only the run knows a part"
"""Name of the decider of a list or a mapping with open parts."""


def convert_to_plain(value: Value) -> object:
    """Return a value as plain data.

    A function or a class becomes its import path, the member of an enum its name, and an object a
    mapping with its class. Open fields of an object are left out.
    """
    if isinstance(value, Object):
        fields: dict[str, object] = {TARGET_KEY: value.kind}
        for name, stated in value.fields.items():
            if not has_open(stated.value):
                fields[name] = convert_to_plain(stated.value)
        return fields
    if isinstance(value, ImportedName):
        holder = value.path.rpartition(".")[0].rpartition(".")[2]
        if holder[:1].isupper():  # the member of an enum
            return value.last
        return value.path
    if isinstance(value, Function | Class):
        return value.path
    if isinstance(value, dict):
        return {name: convert_to_plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [convert_to_plain(inner) for inner in value]
    if isinstance(value, set):
        return sorted(map(str, value))
    return value


def has_open(value: Value) -> bool:
    """Return whether a value is open, or has an open part if it is a list or a mapping."""
    if isinstance(value, dict):
        return any(has_open(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return any(map(has_open, value))
    return is_open(value)


def get_decider(value: Value) -> str:
    """Return the name of the source that decides an open value."""
    if isinstance(value, Object):
        return strip_late_clause(value.decider)
    return PARTLY_OPEN
