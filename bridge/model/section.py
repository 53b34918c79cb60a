"""`read_section`: the values of a section of a run in one form, whoever wrote them.

    section = read_section("model", {"num_layers": "80", "params_dtype": "torch.bfloat16"})
    section.values["num_layers"], section.values["params_dtype"]    # 80, 'bf16'

Dtypes become tokens, and enums become their values. Numbers and switches that are written as text
become numbers and switches. A value of a wrong type becomes a finding and is read as the default.
So a rule can report it, and all other rules still work.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bridge.errors import Finding, WrongValueError
from bridge.model.read_tracking import TrackedValues
from bridge.precision.coercion import coerce, parse_dtype
from bridge.precision.stated_field import get_field_default
from bridge.target.fields import OWNER_DEFAULTS, OWNER_FIELDS, OwnerField
from bridge.target.versions import Version, VersionRange, parse_version

SECTION_NAMES = ("model", "optimizer", "ddp", "train", "data", "peft")
"""The sections of a run that the rules and the plan read."""
NULLABLE_FIELDS = frozenset({"q_lora_rank"})
"""Fields whose default is not None, and in which None has a meaning.

`q_lora_rank` of None, for example: queries have no latent.
"""
_PLAIN_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "name": (str,),
}
"""Kind of a field -> the types whose values need no conversion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """The normalised values of a section of a run.

    The section was a mapping, an object, or missing. `get_stated` returns the stated value of one
    field. `stated_or_none` has the stated values of all fields.
    """

    values: TrackedValues
    """Field -> normalised value. An unstated or malformed field has the class default."""
    is_given: bool = True
    """Whether the run has this section."""
    is_mapping: bool = False
    """Whether the section was a mapping. False: it was an object, or is missing."""
    stated: frozenset[str] = frozenset()
    """The stated fields: the keys of a mapping, or every field of an object.

    Nothing records which fields of an object a user has set.
    """
    malformed: tuple[Finding, ...] = ()
    """A finding for each value whose type is not the type of its field."""
    unknown: Mapping[str, Any] = field(default_factory=dict)
    """Key of a mapping that is not a field in any known release of Megatron -> value."""
    newer_fields: Mapping[str, Any] = field(default_factory=dict)
    """Field of an object's class that no known release has -> value.

    Fields at their defaults are left out.
    """

    def get_stated(self, name: str, default: Any = None) -> Any:
        """Return the stated value of a field, or `default` if nothing or None is stated."""
        value = self.values[name]
        if value is None or name not in self.stated:
            return default
        return value

    @property
    def stated_or_none(self) -> dict[str, Any]:
        """Field -> stated value, or None for a field that is not stated."""
        unstated = dict.fromkeys(self.values)
        stated = {name: value for name, value in self.values.items() if name in self.stated}
        return {**unstated, **stated}

    def with_values(self, values: Mapping[str, Any]) -> Section:
        """Return the section with other, normalised values of some fields."""
        if not values:
            return self
        changed = TrackedValues(self.values.section_name, {**self.values, **values})
        return replace(self, values=changed, is_given=True, stated=self.stated | {*values})

    def find_absent_fields(self, section_name: str, version: Version | None) -> dict[str, str]:
        """Return stated field that a version of Megatron Core lacks -> the versions with it.

        Fields at their defaults are left out.
        """
        version_text = None
        if version is not None:
            version_text = str(version)
        versions: dict[str, str] = {}
        for name, has in list_absent_fields(section_name, version_text).items():
            if name in self.stated and self.values[name] != OWNER_DEFAULTS[section_name][name]:
                versions[name] = str(has)
        return versions

    def with_defaults(self, section_name: str, names: Mapping[str, object]) -> Section:
        """Return the section in which some fields have their class defaults."""
        if not names:
            return self
        values = TrackedValues(section_name, self.values)
        for name in names:
            values[name] = OWNER_DEFAULTS[section_name][name]
        return replace(self, values=values, stated=self.stated - {*names})


@functools.cache
def list_absent_fields(section_name: str, version: str | None) -> dict[str, VersionRange]:
    """Return field that a version does not have -> the versions with it.

    The version is text because results are cached: 0.17 and 0.17.0 are equal as versions, but their
    results differ.
    """
    parsed = None
    if version is not None:
        parsed = parse_version(version)
    absent: dict[str, VersionRange] = {}
    for name, row in OWNER_FIELDS[section_name].items():
        if row.has is not None and row.has.holds(parsed) is False:
            absent[name] = row.has
    return absent


def read_section(
    section_name: str, owner: object, attributes: Mapping[str, Any] | None = None
) -> Section:
    """Return the section that a mapping or an object describes.

    Args:
        owner: A mapping, an object with attributes, a `Section`, or None for a missing section.
        attributes: The attributes of the object before a sync, if a sync has written to it.
    """
    if isinstance(owner, Section):
        return owner
    values = OWNER_DEFAULTS[section_name].copy()
    if owner is None:
        return Section(values=TrackedValues(section_name, values), is_given=False)
    unknown: dict[str, Any] = {}
    malformed: list[Finding] = []
    is_mapping = isinstance(owner, Mapping)
    fields: Mapping[str, Any]
    if isinstance(owner, Mapping):
        fields = owner
    else:
        fields = attributes or get_attributes(section_name, owner)
    for name, value in fields.items():
        row = OWNER_FIELDS[section_name].get(name)
        if row is None:
            unknown[str(name)] = value
        elif type(value) in _PLAIN_TYPES.get(row.kind, ()):
            values[name] = value
        else:
            _store_value(values, row, value, section_name, malformed)
    newer_fields: dict[str, Any] = {}
    if not is_mapping:
        newer_fields = _collect_newer_fields(section_name, owner)
        unknown = {}  # an object may have any further attributes
    return Section(
        values=TrackedValues(section_name, values),
        is_mapping=is_mapping,
        malformed=tuple(malformed),
        unknown=unknown,
        newer_fields=newer_fields,
        stated=frozenset(map(str, fields)),
    )


def find_switched_on(values: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return the first field that is switched on, or None."""
    on = [name for name in names if values[name]]  # reads every switch, so each read is tracked
    if not on:
        return None
    return on[0]


def get_attributes(section_name: str, owner: object) -> Mapping[str, Any]:
    """Return the attributes of an object.

    If the object is not a dataclass, only attributes with names of Megatron's fields are returned.
    """
    if dataclasses.is_dataclass(owner) and hasattr(owner, "__dict__"):
        return vars(owner)
    return {
        name: getattr(owner, name) for name in OWNER_FIELDS[section_name] if hasattr(owner, name)
    }


def _collect_newer_fields(section_name: str, owner: object) -> dict[str, Any]:
    """Return the values of fields that a class of Megatron Core declares and no known release has.

    Fields at their defaults, and fields that a subclass adds, are left out.
    """
    declared: set[str] = set()
    for cls in type(owner).__mro__:
        if cls.__module__.startswith("megatron.core."):
            declared.update(vars(cls).get("__annotations__", {}))
    values: dict[str, Any] = {}
    for name, row in getattr(owner, "__dataclass_fields__", {}).items():
        if name not in declared or name.startswith("_") or name in OWNER_FIELDS[section_name]:
            continue
        value = getattr(owner, name, None)
        if value != get_field_default(row):
            values[name] = value
    return values


def _store_value(
    values: dict[str, Any], row: OwnerField, value: Any, section_name: str, malformed: list[Finding]
) -> None:
    """Store a normalised value, or add a finding if the value has a wrong type."""
    if value is None:
        if row.default is None or row.kind in ("name", "dtype") or row.name in NULLABLE_FIELDS:
            values[row.name] = None
        return  # if the default is not None, Megatron replaces None by the default
    if row.kind == "any":
        values[row.name] = value
        return
    try:
        if row.kind == "dtype":
            values[row.name] = _parse_dtype(value)
        else:
            values[row.name] = coerce(value, row.kind, switch=True)
    except WrongValueError as error:
        path = f"{section_name}.{row.name}"
        malformed.append(Finding(path=path, rule=error.rule, remedy="Correct it.", value=value))


def _parse_dtype(value: Any) -> str | None:
    if value == "fp8":  # Megatron-LM's spelling for optimizer states that are stored as bytes
        return "uint8"
    if isinstance(value, str) and value.lower() in ("none", "null", "auto"):
        return None
    return parse_dtype(value)
