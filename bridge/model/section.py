"""`read_section`: the values of a section of a run in one form, whoever wrote them.

    section = read_section("model", {"num_layers": "80", "params_dtype": "torch.bfloat16"})
    section.values["num_layers"], section.values["params_dtype"]    # 80, 'bf16'

Dtypes become tokens, enums their values, numbers and switches written as text the values they mean. A value of a wrong
type is noted and read as the default, so that a rule about it speaks and the others still work.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bridge.errors import Finding, WrongValueError
from bridge.model.reads import Values
from bridge.precision.fields import default_of
from bridge.precision.values import coerce, dtype_token
from bridge.target.fields import DEFAULTS, FIELDS, OwnerField
from bridge.target.versions import Version, VersionRange, parse_version

ROLES = ("model", "optimizer", "ddp", "train", "data", "peft")
"""The sections that rules and plan read."""
NULLABLE = frozenset({"q_lora_rank"})
"""Fields with another default in which None is a value of its own: queries without a latent."""
_PLAIN: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "name": (str,),
}
"""Kind of a field -> types whose values are kept as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """The values of a section."""

    values: Values
    """Field -> value in one form; the class default where none is given."""
    is_given: bool = True
    malformed: tuple[Finding, ...] = ()
    """Values that are not of their field's type."""
    unknown: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a mapping that no version of Megatron has -> their values."""
    newer: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the class of an object has, away from their defaults, and no release that is known here."""
    stated: frozenset[str] = frozenset()
    """Fields that a mapping gives; all of an object's, which does not say what was given."""
    is_mapping: bool = False

    def given(self, name: str, default: Any = None) -> Any:
        """Return what was given for a field; the default where nothing or None was."""
        value = self.values[name]
        if value is None or name not in self.stated:
            return default
        return value

    @property
    def held(self) -> dict[str, Any]:
        """The values that were given; None for every other field."""
        return {name: value if name in self.stated else None for name, value in self.values.items()}

    def changed(self, values: Mapping[str, Any]) -> Section:
        """Return the section with other values of some fields, in their one form."""
        if not values:
            return self
        changed = Values(self.values.role, {**self.values, **values})
        return replace(self, values=changed, is_given=True, stated=self.stated | {*values})

    def absent_from(self, role: str, version: Version | None) -> dict[str, str]:
        """Return each field away from its default that a version of Megatron Core does not have -> those with it."""
        absent = absent_fields(role, str(version) if version is not None else None)
        found = {}
        for name, has in absent.items():
            if name in self.stated and self.values[name] != DEFAULTS[role][name]:
                found[name] = str(has)
        return found

    def without(self, role: str, names: Mapping[str, object]) -> Section:
        """Return the section with the class defaults of some fields."""
        if not names:
            return self
        values = {**self.values, **{name: DEFAULTS[role][name] for name in names}}
        return replace(self, values=Values(role, values), stated=self.stated - {*names})


@functools.cache
def absent_fields(role: str, version: str | None) -> dict[str, VersionRange]:
    """Return field that a version does not have -> the versions with it; by its text, since 0.17 equals 0.17.0."""
    held, rows = parse_version(version) if version is not None else None, FIELDS[role].items()
    return {
        name: row.has for name, row in rows if row.has is not None and row.has.holds(held) is False
    }


def read_section(role: str, owner: object, attributes: Mapping[str, Any] | None = None) -> Section:
    """Return the section that `owner`, a mapping, an object with attributes or None, describes.

    `attributes` are those of an object where it held others before a sync.
    """
    if isinstance(owner, Section):
        return owner
    values = DEFAULTS[role].copy()
    if owner is None:
        return Section(values=Values(role, values), is_given=False)
    unknown: dict[str, Any] = {}
    malformed: list[Finding] = []
    is_mapping = isinstance(owner, Mapping)
    given: Mapping[str, Any] = owner if is_mapping else attributes or attributes_of(role, owner)  # type: ignore[assignment]
    for name, value in given.items():
        row = FIELDS[role].get(name)
        if row is None:
            unknown[str(name)] = value
        elif type(value) in _PLAIN.get(row.kind, ()):
            values[name] = value
        else:
            _put(values, row, value, role, malformed)
    return Section(
        values=Values(role, values),
        is_mapping=is_mapping,
        malformed=tuple(malformed),
        unknown=unknown if is_mapping else {},
        newer={} if is_mapping else _newer(role, owner),
        stated=frozenset(map(str, given)),
    )


def attributes_of(role: str, owner: object) -> Mapping[str, Any]:
    """Return the attributes of an object; of one that is no dataclass, those that Megatron's class has."""
    if dataclasses.is_dataclass(owner) and hasattr(owner, "__dict__"):
        return vars(owner)
    return {name: getattr(owner, name) for name in FIELDS[role] if hasattr(owner, name)}


def _newer(role: str, owner: object) -> dict[str, Any]:
    """Return the fields away from their defaults that a class of Megatron Core declares and no known release has.

    Subclasses add their own settings.
    """
    theirs = [cls for cls in type(owner).__mro__ if cls.__module__.startswith("megatron.core.")]
    declared = {
        name
        for cls in theirs
        for name in vars(cls).get("__annotations__", {})
        if not name.startswith("_")
    }
    fields = getattr(owner, "__dataclass_fields__", {})
    values = {
        name: getattr(owner, name, None)
        for name in fields
        if name in declared and name not in FIELDS[role]
    }
    return {name: value for name, value in values.items() if value != default_of(fields[name])}


def _put(
    values: dict[str, Any], row: OwnerField, value: Any, role: str, malformed: list[Finding]
) -> None:
    """Store a value in its one form, or note that it has none."""
    if value is None:
        if row.default is None or row.kind in ("name", "dtype") or row.name in NULLABLE:
            values[row.name] = None
        return  # Optional[...] with another default: Megatron reads None as that
    if row.kind == "any":
        values[row.name] = value
        return
    try:
        values[row.name] = (
            _dtype(value) if row.kind == "dtype" else coerce(value, row.kind, switch=True)
        )
    except WrongValueError as error:
        malformed.append(
            Finding(path=f"{role}.{row.name}", rule=error.rule, remedy="Correct it.", value=value)
        )


def _dtype(value: Any) -> str | None:
    if value == "fp8":  # Megatron-LM's spelling for optimizer states kept as bytes
        return "uint8"
    return (
        None
        if isinstance(value, str) and value.lower() in ("none", "null", "auto")
        else dtype_token(value)
    )
