"""`read_section`: the values of a section of a run in one form, whoever wrote them.

    section = read_section("model", {"num_layers": "80", "params_dtype": "torch.bfloat16"})
    section.values["num_layers"], section.values["params_dtype"]    # 80, 'bf16'

Dtypes become tokens, enums their values, numbers and switches written as text the values they mean.
A value of a wrong type is noted and read as the default, so that a rule about it speaks and the
others still work.
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
from bridge.precision.fields import get_field_default
from bridge.target.fields import OWNER_DEFAULTS, OWNER_FIELDS, OwnerField
from bridge.target.versions import Version, VersionRange, parse_version

SECTION_NAMES = ("model", "optimizer", "ddp", "train", "data", "peft")
"""The sections that rules and plan read."""
NULLABLE_FIELDS = frozenset({"q_lora_rank"})
"""Fields with another default in which None is a value of its own: queries without a latent."""
_PLAIN_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "name": (str,),
}
"""Kind of a field -> types whose values are kept as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """The values of a section, and the keys of its mapping or object by what is known of them.

        stated            fields of Megatron's class; their values are in `values`
        malformed         those whose values have a wrong type: `values` has the default there
        unknown           keys of a mapping that no release of Megatron has
        of_newer_release  fields of an object that only a release not known here has

    `given` returns the stated value of one field, `stated_or_none` those of all fields.
    """

    values: TrackedValues
    """Field -> value in one form; the class default where none is stated."""
    is_given: bool = True
    """Whether there is a mapping or an object."""
    is_mapping: bool = False
    stated: frozenset[str] = frozenset()
    """Fields of a mapping; every field of an object, which does not tell who set it."""
    malformed: tuple[Finding, ...] = ()
    """A finding for each value that is not of its field's type."""
    unknown: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a mapping that no version of Megatron has -> their values."""
    newer_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields that an object's class has and no release known here -> values away from defaults."""

    def given(self, name: str, default: Any = None) -> Any:
        """Return the stated value of a field; the default where nothing or None is stated."""
        value = self.values[name]
        if value is None or name not in self.stated:
            return default
        return value

    @property
    def stated_or_none(self) -> dict[str, Any]:
        """The stated value of each field; None for a field that is not stated."""
        unstated = dict.fromkeys(self.values)
        stated = {name: value for name, value in self.values.items() if name in self.stated}
        return {**unstated, **stated}

    def with_values(self, values: Mapping[str, Any]) -> Section:
        """Return the section with other values of some fields, in their one form."""
        if not values:
            return self
        changed = TrackedValues(self.values.role, {**self.values, **values})
        return replace(self, values=changed, is_given=True, stated=self.stated | {*values})

    def find_absent_fields(self, role: str, version: Version | None) -> dict[str, str]:
        """Return each field that a version of Megatron Core does not have -> the versions with it.

        Fields at their defaults are left out.
        """
        text = None
        if version is not None:
            text = str(version)
        versions: dict[str, str] = {}
        for name, has in list_absent_fields(role, text).items():
            if name in self.stated and self.values[name] != OWNER_DEFAULTS[role][name]:
                versions[name] = str(has)
        return versions

    def without(self, role: str, names: Mapping[str, object]) -> Section:
        """Return the section with the class defaults of some fields."""
        if not names:
            return self
        values = TrackedValues(role, self.values)
        for name in names:
            values[name] = OWNER_DEFAULTS[role][name]
        return replace(self, values=values, stated=self.stated - {*names})


@functools.cache
def list_absent_fields(role: str, version: str | None) -> dict[str, VersionRange]:
    """Return field that a version does not have -> the versions with it.

    The version is text, since 0.17 equals 0.17.0.
    """
    parsed = None
    if version is not None:
        parsed = parse_version(version)
    absent: dict[str, VersionRange] = {}
    for name, row in OWNER_FIELDS[role].items():
        if row.has is not None and row.has.holds(parsed) is False:
            absent[name] = row.has
    return absent


def read_section(role: str, owner: object, attributes: Mapping[str, Any] | None = None) -> Section:
    """Return the section that `owner`, a mapping, an object with attributes or None, describes.

    `attributes` are those of an object where it held others before a sync.
    """
    if isinstance(owner, Section):
        return owner
    values = OWNER_DEFAULTS[role].copy()
    if owner is None:
        return Section(values=TrackedValues(role, values), is_given=False)
    unknown: dict[str, Any] = {}
    malformed: list[Finding] = []
    is_mapping = isinstance(owner, Mapping)
    fields: Mapping[str, Any]
    if isinstance(owner, Mapping):
        fields = owner
    else:
        fields = attributes or get_attributes(role, owner)
    for name, value in fields.items():
        row = OWNER_FIELDS[role].get(name)
        if row is None:
            unknown[str(name)] = value
        elif type(value) in _PLAIN_TYPES.get(row.kind, ()):
            values[name] = value
        else:
            _store_value(values, row, value, role, malformed)
    of_newer_release: dict[str, Any] = {}
    if not is_mapping:
        of_newer_release = _collect_newer_fields(role, owner)
        unknown = {}  # an object may have any further attributes
    return Section(
        values=TrackedValues(role, values),
        is_mapping=is_mapping,
        malformed=tuple(malformed),
        unknown=unknown,
        newer_fields=of_newer_release,
        stated=frozenset(map(str, fields)),
    )


def find_switched_on(values: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return the first field that is switched on; None: none is."""
    on = [name for name in names if values[name]]  # each is read, since each decides
    if not on:
        return None
    return on[0]


def get_attributes(role: str, owner: object) -> Mapping[str, Any]:
    """Return the attributes of an object.

    Of an object that is no dataclass they are those that Megatron's class has.
    """
    if dataclasses.is_dataclass(owner) and hasattr(owner, "__dict__"):
        return vars(owner)
    return {name: getattr(owner, name) for name in OWNER_FIELDS[role] if hasattr(owner, name)}


def _collect_newer_fields(role: str, owner: object) -> dict[str, Any]:
    """Return the fields that a class of Megatron Core declares and no known release has.

    Fields at their defaults are left out, and so are those of subclasses, which add their own.
    """
    declared: set[str] = set()
    for cls in type(owner).__mro__:
        if cls.__module__.startswith("megatron.core."):
            declared.update(vars(cls).get("__annotations__", {}))
    values: dict[str, Any] = {}
    for name, row in getattr(owner, "__dataclass_fields__", {}).items():
        if name not in declared or name.startswith("_") or name in OWNER_FIELDS[role]:
            continue
        value = getattr(owner, name, None)
        if value != get_field_default(row):
            values[name] = value
    return values


def _store_value(
    values: dict[str, Any], row: OwnerField, value: Any, role: str, malformed: list[Finding]
) -> None:
    """Store a value in its one form, or note that it has none."""
    if value is None:
        if row.default is None or row.kind in ("name", "dtype") or row.name in NULLABLE_FIELDS:
            values[row.name] = None
        return  # Optional[...] with another default: Megatron reads None as that
    if row.kind == "any":
        values[row.name] = value
        return
    try:
        if row.kind == "dtype":
            values[row.name] = _parse_dtype(value)
        else:
            values[row.name] = coerce(value, row.kind, switch=True)
    except WrongValueError as error:
        path = f"{role}.{row.name}"
        malformed.append(Finding(path=path, rule=error.rule, remedy="Correct it.", value=value))


def _parse_dtype(value: Any) -> str | None:
    if value == "fp8":  # Megatron-LM's spelling for optimizer states kept as bytes
        return "uint8"
    if isinstance(value, str) and value.lower() in ("none", "null", "auto"):
        return None
    return parse_dtype(value)
