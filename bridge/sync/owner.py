"""`Owner`: a config object that a sync writes into; `OwnerValues`: the values of such an object.

    Owner("model", transformer_config).read().value("params_dtype")    # "bf16"

The name of an owner is "model", "optimizer", "ddp" or "train". It is an object of Megatron's
config class, or an object with attributes of the same names.

Values are normalised: a dtype is its token, an enum its value. So the same code plans for an object
that is written to, for a mapping from a file, and for the run that a check predicts. Planning needs
neither torch nor Megatron's classes.
"""

import dataclasses
import enum
import functools
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.errors import PrecisionTypeError
from bridge.model.read_tracking import TrackedValues
from bridge.model.section import Section, get_attributes, list_absent_fields, read_section
from bridge.precision.coercion import is_torch_dtype, parse_dtype
from bridge.precision.owners import ConfigObject
from bridge.precision.precision_config import FIELD_DEFAULTS
from bridge.precision.stated_field import get_field_default
from bridge.sync.field_routes import OWNER_CLASS_NAMES, ROUTES
from bridge.target.fields import OWNER_DEFAULTS, OWNER_FIELDS, SHARED_SWITCHES
from bridge.target.versions import Version

SYNC_MEMORY_ATTRIBUTE = "_precision_bridge_written"
"""The attribute of an owner that records the values that syncs wrote.

Its value is {attribute: (value written, value before the first sync)}.
"""

_ROUTED = {route.attribute for route in ROUTES if route.attribute is not None}
PRECISION_ATTRIBUTES = frozenset(FIELD_DEFAULTS) | _ROUTED
"""Every name under which an owner may hold a field of a precision."""
PLANNED_ATTRIBUTES = PRECISION_ATTRIBUTES | {
    *SHARED_SWITCHES,
    "use_megatron_fsdp",
    "check_for_nan_in_grad",
    "check_for_nan_in_loss",
}
"""Every attribute that a plan reads."""

COMPUTED_FROM = {"autocast_dtype": "params_dtype"}
"""Attribute -> the attribute from which Megatron computes its value if it is None."""

ABSENT: Any = dataclasses.MISSING
"""The value of an attribute that an owner does not have."""


@dataclass(frozen=True, kw_only=True)
class OwnerValues:
    """The normalised values of an owner. Equal values get equal plans."""

    name: str
    """model, optimizer, ddp or train; "config" for an object of an unknown class."""
    section: Section
    """Every field of the owner, with the class default of a field that is not set."""
    values: Mapping[str, Any]
    """Attribute of `PLANNED_ATTRIBUTES` that the owner has -> its value now."""
    before: Mapping[str, Any] = field(default_factory=dict)
    """Attribute that a sync changed -> its value before the first sync."""
    defaults: Mapping[str, Any]
    """Attribute -> Megatron's class default."""
    is_megatron: bool = True
    """Whether the owner's class is Megatron's, or a subclass of it."""
    class_name: str
    """The name of the class in messages."""
    is_partial: bool = field(default=False, compare=False)
    """Whether the owner is a mapping, which may describe a part of a model."""

    @classmethod
    def from_section(
        cls, owner_name: str, section: Section, version: Version | None
    ) -> "OwnerValues":
        """Return the values of a section of a run.

        Args:
            owner_name: model, optimizer, ddp or train.
            version: The version of megatron-core whose fields the owner has. None: it has every
                known field.
        """
        version_text = None
        if version is not None:
            version_text = str(version)
        absent = list_absent_fields(owner_name, version_text)
        names = PLANNED_ATTRIBUTES & OWNER_FIELDS[owner_name].keys() - absent.keys()
        values = {name: normalise_value(section.values[name]) for name in names}
        defaults = {name: OWNER_DEFAULTS[owner_name][name] for name in names}
        return cls(
            name=owner_name,
            section=section,
            values=values,
            defaults=defaults,
            is_megatron=owner_name != "train",
            class_name=OWNER_CLASS_NAMES[owner_name],
            is_partial=True,
        )

    def has(self, attribute: str) -> bool:
        """Return whether the owner has the attribute."""
        return attribute in self.values

    def value(self, attribute: str) -> Any:
        """Return the value of an attribute now, or None if the owner does not have it."""
        return self.values.get(attribute)

    def value_before_sync(self, attribute: str) -> Any:
        """Return the value that an attribute had before the first sync.

        A value that somebody assigned after that sync is returned instead.
        """
        if attribute in self.before:
            return self.before[attribute]
        return self.value(attribute)

    def is_set(self, attribute: str) -> bool:
        """Return whether somebody set the value that an attribute had before the first sync.

        A value counts as set if it differs from the class default.
        """
        value = self.value_before_sync(attribute)
        if attribute not in self.defaults or is_same_value(value, self.defaults[attribute]):
            return False
        source = COMPUTED_FROM.get(attribute)
        if source is None:
            return True
        # Megatron copied an equal value from the source attribute. Nobody set it.
        return not is_same_value(value, self.value_before_sync(source))


class Owner:
    """A config object that a sync writes into.

    Args:
        owner_name: model, optimizer, ddp or train; "config" for an object of an unknown class.
        config: The object. If it only wraps a config as its `transformer`, the owner is that config.
    """

    def __init__(self, owner_name: str, config: ConfigObject) -> None:
        self.name = owner_name
        self.config = unwrap_config(config)
        megatron_classes = _list_megatron_classes(type(self.config))
        self.megatron_class: Any = type(self.config)
        """The class of the object, or the class of Megatron that it derives from.

        A model provider of Megatron Bridge is a subclass of Megatron's class, for example.
        """
        if megatron_classes:
            self.megatron_class = megatron_classes[0]
        self.is_megatron = bool(megatron_classes)

    @property
    def is_deferred(self) -> bool:
        """Whether Megatron's `__post_init__` does not run before `finalize` is called.

        The config classes of Megatron Bridge defer it.
        """
        cls = type(self.config)
        post_init = getattr(cls, "__post_init__", None)
        is_replaced = post_init is not getattr(self.megatron_class, "__post_init__", None)
        return self.is_megatron and is_replaced and callable(getattr(cls, "finalize", None))

    def read(self) -> OwnerValues:
        """Return the normalised values of the object."""
        values: dict[str, Any] = {}
        for name in PLANNED_ATTRIBUTES:
            value = self.value(name)
            if value is not ABSENT:
                values[name] = normalise_value(value)
        defaults: dict[str, Any] = {}
        for name, default in get_class_defaults(self.megatron_class).items():
            if name in values:
                defaults[name] = normalise_value(default)
        section = Section(values=TrackedValues(self.name, {}))
        if self.name in OWNER_FIELDS:
            section = read_section(self.name, self.config)
        class_name = type(self.config).__name__
        if self.is_megatron and self.name in OWNER_CLASS_NAMES:
            class_name = OWNER_CLASS_NAMES[self.name]
        return OwnerValues(
            name=self.name,
            section=section,
            values=values,
            before=self._collect_values_before_sync(values),
            defaults=defaults,
            is_megatron=self.is_megatron,
            class_name=class_name,
        )

    def _collect_values_before_sync(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values before the first sync that differ from the values now."""
        values_before: dict[str, Any] = {}
        for name in self._written:
            if name in values:
                value_before = normalise_value(self.value_before_sync(name))
                if not is_same_value(value_before, values[name]):
                    values_before[name] = value_before
        return values_before

    def value(self, attribute: str) -> Any:
        """Return the value of an attribute now, or `ABSENT` if the object does not have it."""
        return getattr(self.config, attribute, ABSENT)

    def value_before_sync(self, attribute: str) -> Any:
        """Return the value that an attribute had before the first sync.

        A value that somebody assigned after that sync is returned instead.
        """
        if attribute in self._written:
            written, value_before = self._written[attribute]
            if is_same_value(written, self.value(attribute)):
                return value_before
        return self.value(attribute)

    @property
    def _written(self) -> Mapping[str, Any]:
        """Attribute -> (value that a sync wrote, value before the first sync)."""
        if not hasattr(self.config, "__dict__"):
            return {}
        written = vars(self.config).get(SYNC_MEMORY_ATTRIBUTE)
        if isinstance(written, dict):
            return written
        return {}

    def remember(self, written: Mapping[str, Any], values_before: Mapping[str, Any]) -> None:
        """Record the values that a sync wrote, so that the next sync starts from the values before.

        Args:
            written: Attribute -> the value that the sync wrote.
            values_before: Attribute -> the value before the first sync.
        """
        if not hasattr(self.config, "__dict__"):
            return
        record = dict(self._written)
        for attribute, value in written.items():
            record[attribute] = (value, values_before[attribute])
        if record:
            vars(self.config)[SYNC_MEMORY_ATTRIBUTE] = record


NON_CONFIG_TYPES = (type, str, dict, list, tuple, int, float)
"""Types of objects that cannot be owners."""


def has_precision_field(owner: Owner) -> bool:
    """Return whether an object has an attribute that a precision is written into."""
    return owner.name == "train" or any(
        owner.value(name) is not ABSENT for name in PRECISION_ATTRIBUTES
    )


def refuse_non_owners(owners: Collection[Owner]) -> None:
    """Refuse a sync without owners, and objects that cannot be owners.

    Raises:
        PrecisionTypeError: There is no owner; or an object is a class or plain data, is the config
            of another owner name, is passed twice, or has no field of a precision.
    """
    if not owners:
        rule = "a sync writes into at least one of model, optimizer, ddp and train"
        raise PrecisionTypeError.of("model", rule, None, "Give the model's config, for example.")
    seen: dict[int, str] = {}
    for owner in owners:
        config = owner.config
        rule = "must be the config object of this owner"
        if isinstance(config, NON_CONFIG_TYPES):
            class_name = OWNER_CLASS_NAMES.get(owner.name, "one of Megatron's config classes")
            remedy = f"Give an instance of {class_name}."
            raise PrecisionTypeError(f"{owner.name}: {rule}, got {config!r:.80}. {remedy}")
        name_by_class = get_owner_name(config)
        if name_by_class not in ("config", owner.name):
            remedy = f"Give it as {name_by_class}."
            raise PrecisionTypeError(f"{owner.name}: {rule}, got {config!r:.80}. {remedy}")
        if id(config) in seen:
            raise PrecisionTypeError(
                f"{owner.name}: is the same object as {seen[id(config)]}, and the two hold "
                "different things. Give each owner a different object."
            )
        if not has_precision_field(owner):
            remedy = "Give the object that Megatron reads."
            raise PrecisionTypeError.of(owner.name, "has no field of a precision", config, remedy)
        seen[id(config)] = owner.name


def _list_megatron_classes(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base.__module__.startswith("megatron.core")]


def get_owner_name(config: ConfigObject) -> str:
    """Return the owner name of a config object by its class, or "config" for an unknown class."""
    names = {base.__name__ for base in _list_megatron_classes(type(unwrap_config(config)))}
    for owner_name, class_name in OWNER_CLASS_NAMES.items():
        if class_name in names:
            return owner_name
    return "config"


def normalise_value(value: Any) -> Any:
    """Return a dtype as its token, an enum as its value, a tuple as a list, other values unchanged."""
    if is_torch_dtype(value):
        return parse_dtype(value)
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, enum.Enum):
        return value.value
    return value


def is_same_value(first: object, second: object) -> bool:
    """Return whether two values are equal, and both or neither are booleans.

    A value whose `__eq__` raises is equal only to itself.
    """
    if first is second:
        return True
    if isinstance(first, bool) != isinstance(second, bool):
        return False
    try:
        return bool(first == second)
    except Exception:  # noqa: BLE001  arrays and mocks may refuse to be compared
        return False


def get_values_before_sync(owner_name: str, config: ConfigObject) -> Mapping[str, Any]:
    """Return the attributes of a config object as they were before the first sync."""
    attributes = get_attributes(owner_name, config)
    if SYNC_MEMORY_ATTRIBUTE not in attributes:
        return attributes
    owner = Owner(owner_name, config)
    return {
        name: owner.value_before_sync(name)
        for name in OWNER_FIELDS[owner_name]
        if name in attributes
    }


def unwrap_config(config: ConfigObject) -> ConfigObject:
    """Return the Megatron config that an object wraps as its `transformer`, or the object itself.

    The model configs of the builders of Megatron-LM and Megatron Bridge wrap a config in this way.
    They have no precision fields themselves.
    """
    transformer = getattr(config, "__dict__", {}).get("transformer")
    if _is_model_config(transformer) and not _is_model_config(config):
        return transformer
    return config


def _is_model_config(config: ConfigObject) -> bool:
    names = {base.__name__ for base in _list_megatron_classes(type(config))}
    return OWNER_CLASS_NAMES["model"] in names


@functools.cache
def find_annotated_class(cls: type, attribute: str) -> type | None:
    """Return the class in the annotation of a field, or None unless it names exactly one class.

    `None` in the annotation does not count.
    """
    annotation = typing.get_type_hints(cls).get(attribute)
    alternatives = typing.get_args(annotation) or (annotation,)
    members = [member for member in alternatives if member is not type(None)]
    if len(members) == 1 and isinstance(members[0], type):
        return members[0]
    return None


@functools.cache
def get_class_defaults(cls: type) -> dict[str, Any]:
    """Return the class defaults of the planned attributes of a dataclass."""
    if not dataclasses.is_dataclass(cls):
        return {}
    defaults = {}
    for field_ in dataclasses.fields(cls):
        if field_.name in PLANNED_ATTRIBUTES:
            default = get_field_default(field_)
            if default is not dataclasses.MISSING:
                defaults[field_.name] = default
    return defaults
