"""One section of a run (model, optimizer, ddp, ...) read from a mapping or any object, its values in one form.

Dtypes become tokens, enums their values, numbers and switches written as text the values they mean. A value of a wrong
type is noted and read as the default, so that a rule about it speaks and the others still work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.errors import PrecisionTypeError, WrongValueError
from bridge.precision.dtypes import dtype_token
from bridge.precision.fields import coerce
from bridge.registry.config import MixedPrecisionConfig
from bridge.rules.fields import DEFAULTS, FIELDS, NAMES, OwnerField
from bridge.sync.owner import WRITTEN, Owner, seen_through

__all__ = ["Malformed", "Section", "read_precision", "read_section"]

_PRECISION = frozenset(MixedPrecisionConfig.field_names())
_MISSING = object()
_PLAIN: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (float, int), "name": (str,)}
_ROWS = {role: {name: (_PLAIN.get(row.kind, ()), row) for name, row in rows.items()} for role, rows in FIELDS.items()}
"""Section -> field -> types whose values are kept as they are, and the row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Malformed:
    """A value that is not of its field's type."""

    path: str
    """section.field."""
    value: Any
    """The value that was given."""
    why: str
    """The type it must have, as a clause."""


@dataclass(kw_only=True, slots=True)
class Section:
    """The values of a section."""

    values: dict[str, Any]
    """Field -> value in one form; the class default where none is given."""
    is_given: bool
    """Whether there is such a section at all."""
    malformed: list[Malformed] = field(default_factory=list)
    """Values of a wrong type."""
    unknown: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a mapping that no version of Megatron has -> their values."""


def read_section(role: str, owner: object) -> Section:
    """Return the section that `owner` describes.

    Args:
        role: model, optimizer, ddp, train, data or peft.
        owner: A mapping, an object with attributes, or None for a section that is not there.
    """
    values = DEFAULTS[role].copy()
    if owner is None:
        return Section(values=values, is_given=False)
    rows = _ROWS[role]
    unknown: dict[str, Any] = {}
    malformed: list[Malformed] = []
    is_mapping = isinstance(owner, Mapping)
    given: Mapping[str, Any] = owner if is_mapping else _attributes(role, owner)  # type: ignore[assignment]
    for name, value in given.items():
        found = rows.get(name)
        if found is None:
            unknown[name] = value
        elif type(value) in found[0]:
            values[name] = value
        else:
            _put(values, found[1], value, role, malformed)
    known = NAMES.get(role) if is_mapping else None
    misspelt = {} if known is None else {str(name): unknown[name] for name in unknown if name not in known}
    return Section(values=values, is_given=True, malformed=malformed, unknown=misspelt)


def read_precision(given: Mapping[str, Any]) -> tuple[MixedPrecisionConfig, list[Malformed], dict[str, Any]]:
    """Return the config that a mapping of stated fields describes, what is of a wrong type in it, and what is no field.

    Args:
        given: Fields by name, as a recipe file, a saved run or Megatron Bridge's YAML has them.
    """
    stated: dict[str, Any] = {}
    malformed: list[Malformed] = []
    unknown: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key)
        if name.startswith("_"):  # Megatron Bridge's _target_ and _call_
            continue
        if name not in _PRECISION:
            unknown[name] = value
            continue
        dtype = isinstance(value, Mapping) and "_target_" in value  # by its import path
        try:
            stated |= MixedPrecisionConfig.from_dict({name: value["_target_"] if dtype else value}).to_dict()
        except PrecisionTypeError as error:
            malformed.append(Malformed(path=error.path, value=value, why=error.rule))
    return MixedPrecisionConfig.from_dict(stated), malformed, unknown


def _put(values: dict[str, Any], row: OwnerField, value: Any, role: str, malformed: list[Malformed]) -> None:
    """Store a value in its one form, or note that it has none."""
    if value is None:
        if row.default is None or row.kind in ("name", "dtype"):
            values[row.name] = None
        return  # Optional[...] with another default: Megatron reads None as that
    if row.kind == "any":
        values[row.name] = value
        return
    try:
        values[row.name] = _dtype(value) if row.kind == "dtype" else coerce(value, row.kind, switch=True)
    except WrongValueError as error:
        malformed.append(Malformed(path=f"{role}.{row.name}", value=value, why=error.rule))


def _dtype(value: Any) -> str | None:
    """Return a dtype's token; Megatron Bridge's YAML has ``{_target_: torch.bfloat16, _call_: false}`` for one."""
    if isinstance(value, Mapping) and "_target_" in value:
        value = value["_target_"]
    if value == "fp8":  # Megatron-LM's spelling for optimizer states kept as bytes
        return "uint8"
    return None if isinstance(value, str) and value.lower() in ("none", "null", "auto") else dtype_token(value)


def _attributes(role: str, owner: object) -> Mapping[str, Any]:
    """Return an object's values as they were before any sync wrote to it."""
    owner = seen_through(owner)
    if not dataclasses.is_dataclass(owner) or not hasattr(owner, "__dict__"):
        found = {name: getattr(owner, name, _MISSING) for name in FIELDS[role]}
        return {name: value for name, value in found.items() if value is not _MISSING}
    given = vars(owner)
    if WRITTEN in given:
        before = Owner(role, owner)
        given = {name: before.own(name) for name in FIELDS[role] if name in given}
    return given
