"""`convert_to_plain`: a value of a followed program as plain data, as the YAML of a run has it."""

from __future__ import annotations

from bridge.read.megatron_bridge.saved_container import TARGET_KEY
from bridge.read.megatron_bridge.values import Class, Function, ImportedName, Object, Value, is_open


def convert_to_plain(value: Value) -> object:
    """Return a value without open parts as plain data: import paths of functions and classes, names of enums."""
    if isinstance(value, Object):
        fields = {
            name: convert_to_plain(stated.value)
            for name, stated in value.fields.items()
            if not has_open(stated.value)
        }
        return {TARGET_KEY: value.kind, **fields}
    if isinstance(value, ImportedName):
        holder = value.path.rpartition(".")[0].rpartition(".")[2]
        if holder[:1].isupper():  # the member of an enum
            return value.last
        return value.path
    if isinstance(value, Function):
        return f"{value.module.name}.{value.node.name}"
    if isinstance(value, Class):
        return value.path
    if isinstance(value, dict):
        return {name: convert_to_plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [convert_to_plain(inner) for inner in value]
    if isinstance(value, set):
        return sorted(map(str, value))
    return value


def has_open(value: Value) -> bool:
    """Return whether only the run knows a value, or a part of a list or a mapping."""
    if isinstance(value, dict):
        return any(has_open(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return any(map(has_open, value))
    return is_open(value)


def get_decider(value: Value) -> str:
    """Return what decides an open value."""
    if isinstance(value, Object):
        return get_decider_noun(value.decider)
    return "of which only the run knows a part"


def get_decider_noun(decider: str) -> str:
    """Return what decides a value, without the clause that only the run knows it."""
    return decider.removesuffix(", which only the run knows,")
