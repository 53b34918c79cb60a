"""`Owner`: a config object of Megatron, or an object like it, in a role; `OwnerValues`: its values.

    Owner("model", transformer_config).read().value("params_dtype")    # "bf16"

Values have the same form in every plan: dtypes are tokens, enums their values. So an object that is
written to, a mapping of a file and the run that a check foresees are planned by the same code.
Neither torch nor Megatron's class is needed for it.
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
from bridge.precision.config import FIELD_DEFAULTS
from bridge.precision.fields import get_field_default
from bridge.sync.routes import OWNER_CLASS_NAMES, ROUTES
from bridge.target.fields import OWNER_DEFAULTS, OWNER_FIELDS, SHARED_SWITCHES
from bridge.target.versions import Version

SYNC_MEMORY_ATTRIBUTE = "_precision_bridge_written"
"""Name under which an owner remembers what a sync wrote.

Its value is {attribute: (value written, the owner's own value)}.
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
"""Attribute -> the attribute that Megatron fills it in from where it is None."""


ABSENT: Any = dataclasses.MISSING
"""Stands for the value of an attribute that is not there."""


@dataclass(frozen=True, kw_only=True)
class OwnerValues:
    """An owner as a plan reads it; equal owners get equal plans."""

    role: str
    """model, optimizer, ddp or train; "config" for an object of which nothing is known."""
    section: Section
    """Every value of the owner; its class defaults where it has none."""
    values: Mapping[str, Any]
    """Attribute of `PLANNED` that is there -> value."""
    before: Mapping[str, Any] = field(default_factory=dict)
    """Attribute that a sync wrote -> the value before the first sync."""
    defaults: Mapping[str, Any]
    """Attribute -> Megatron's own class default."""
    is_megatron: bool = True
    """Whether the owner's class is Megatron's, or a subclass of it."""
    class_name: str
    """The class in messages."""
    is_partial: bool = field(default=False, compare=False)
    """Whether the owner is a mapping, which may describe a part of a model."""

    @classmethod
    def from_section(cls, role: str, section: Section, version: Version | None) -> "OwnerValues":
        """Return the values of a section of a run.

        Args:
            role: model, optimizer, ddp or train.
            section: The section.
            version: The megatron-core whose fields it has; None: every known field.
        """
        version_text = None
        if version is not None:
            version_text = str(version)
        absent = list_absent_fields(role, version_text)
        names = PLANNED_ATTRIBUTES & OWNER_FIELDS[role].keys() - absent.keys()
        values = {name: normalise_value(section.values[name]) for name in names}
        defaults = {name: OWNER_DEFAULTS[role][name] for name in names}
        return cls(
            role=role,
            section=section,
            values=values,
            defaults=defaults,
            is_megatron=role != "train",
            class_name=OWNER_CLASS_NAMES[role],
            is_partial=True,
        )

    def has(self, attribute: str) -> bool:
        """Return whether the owner has the attribute."""
        return attribute in self.values

    def value(self, attribute: str) -> Any:
        """Return the value of an attribute now; None for an attribute that is not there."""
        return self.values.get(attribute)

    def own(self, attribute: str) -> Any:
        """Return the value of an attribute before any sync wrote to it, or a value that was set since."""
        if attribute in self.before:
            return self.before[attribute]
        return self.value(attribute)

    def is_own(self, attribute: str) -> bool:
        """Return whether the value was set: it differs from Megatron's class default."""
        own = self.own(attribute)
        if attribute not in self.defaults or is_same_value(own, self.defaults[attribute]):
            return False
        source = COMPUTED_FROM.get(
            attribute
        )  # a value that Megatron computed is not the owner's own
        return source is None or not is_same_value(own, self.own(source))


class Owner:
    """An object in a role of `OwnerValues`.

    An object that holds a config as its `transformer` and hands attributes on to it stands for that
    config.
    """

    def __init__(self, role: str, target: Any) -> None:
        self.role = role
        self.target = unwrap_config(target)
        megatron_classes = _list_megatron_classes(type(self.target))
        self.defining: Any = type(self.target)
        """Megatron's class behind a subclass (a model provider, for example), or the class."""
        if megatron_classes:
            self.defining = megatron_classes[0]
        self.is_megatron = bool(megatron_classes)

    @property
    def is_deferred(self) -> bool:
        """Whether Megatron's `__post_init__` waits for a call of `finalize`.

        It does in the classes of Megatron Bridge.
        """
        cls = type(self.target)
        post_init = getattr(cls, "__post_init__", None)
        waits = post_init is not getattr(self.defining, "__post_init__", None)
        return self.is_megatron and waits and callable(getattr(cls, "finalize", None))

    def read(self) -> OwnerValues:
        """Return the object as a plan reads it."""
        values: dict[str, Any] = {}
        for name in PLANNED_ATTRIBUTES:
            value = self.value(name)
            if value is not ABSENT:
                values[name] = normalise_value(value)
        defaults: dict[str, Any] = {}
        for name, default in get_class_defaults(self.defining).items():
            if name in values:
                defaults[name] = normalise_value(default)
        section = Section(values=TrackedValues(self.role, {}))
        if self.role in OWNER_FIELDS:
            section = read_section(self.role, self.target)
        class_name = type(self.target).__name__
        if self.is_megatron and self.role in OWNER_CLASS_NAMES:
            class_name = OWNER_CLASS_NAMES[self.role]
        return OwnerValues(
            role=self.role,
            section=section,
            values=values,
            before=self._collect_values_before_sync(values),
            defaults=defaults,
            is_megatron=self.is_megatron,
            class_name=class_name,
        )

    def _collect_values_before_sync(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values before any sync, where they differ from those of now."""
        before: dict[str, Any] = {}
        for name in self._written:
            if name in values:
                own = normalise_value(self.own(name))
                if not is_same_value(own, values[name]):
                    before[name] = own
        return before

    def value(self, attribute: str) -> Any:
        """Return the value of an attribute now; `ABSENT` for an attribute that is not there."""
        return getattr(self.target, attribute, ABSENT)

    def own(self, attribute: str) -> Any:
        """Return the value of an attribute before any sync wrote to it, or a value that was set since."""
        written = self._written
        if attribute in written and is_same_value(written[attribute][0], self.value(attribute)):
            return written[attribute][1]
        return self.value(attribute)

    @property
    def _written(self) -> Mapping[str, Any]:
        if not hasattr(self.target, "__dict__"):
            return {}
        written = vars(self.target).get(SYNC_MEMORY_ATTRIBUTE)
        if isinstance(written, dict):
            return written
        return {}

    def remember(self, written: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Note the values that a sync wrote, so that the next sync starts from the owner's own values.

        Args:
            written: Attribute -> the value that the sync wrote.
            own: Attribute -> the owner's own value.
        """
        if not hasattr(self.target, "__dict__"):
            return
        record = dict(self._written)
        for attribute, value in written.items():
            record[attribute] = (value, own[attribute])
        if record:
            vars(self.target)[SYNC_MEMORY_ATTRIBUTE] = record


NON_CONFIG_TYPES = (type, str, dict, list, tuple, int, float)
"""Types of objects that are no config."""


def has_precision_field(owner: Owner) -> bool:
    """Return whether an object has an attribute that a precision is written into."""
    return owner.role == "train" or any(
        owner.value(name) is not ABSENT for name in PRECISION_ATTRIBUTES
    )


def refuse_non_owners(owners: Collection[Owner]) -> None:
    """Refuse a sync without owners, and objects that are no owner; PrecisionTypeError.

    No owner is a class, plain data, the config of another role, an object that has a role already,
    and an object without a field of a precision.
    """
    if not owners:
        rule = "a sync writes into at least one of model, optimizer, ddp and train"
        raise PrecisionTypeError.of("model", rule, None, "Give the model's config, for example.")
    seen: dict[int, str] = {}
    for owner in owners:
        target, role = owner.target, get_owner_name(owner.target)
        kind = f"{owner.role}: must be a config object in that role, got {target!r:.80}"
        if isinstance(target, NON_CONFIG_TYPES):
            cls = OWNER_CLASS_NAMES.get(owner.role, "one of Megatron's config classes")
            raise PrecisionTypeError(f"{kind}. Give an instance of {cls}.")
        if role not in ("config", owner.role):
            raise PrecisionTypeError(f"{kind}. Give it as {role}.")
        if id(target) in seen:
            what = f"is the same object as {seen[id(target)]}, and the two hold different things"
            raise PrecisionTypeError(f"{owner.role}: {what}. Give each role its own object.")
        if not has_precision_field(owner):
            remedy = "Give the object that Megatron reads."
            raise PrecisionTypeError.of(owner.role, "has no field of a precision", target, remedy)
        seen[id(target)] = owner.role


def _list_megatron_classes(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base.__module__.startswith("megatron.core")]


def get_owner_name(target: Any) -> str:
    """Return the role of a config object, by its class; "config" for no class of Megatron's."""
    names = {base.__name__ for base in _list_megatron_classes(type(unwrap_config(target)))}
    for role, class_name in OWNER_CLASS_NAMES.items():
        if class_name in names:
            return role
    return "config"


def normalise_value(value: Any) -> Any:
    """Return a value in the form of a plan: a dtype's token, an enum's value, a list for a tuple."""
    if is_torch_dtype(value):
        return parse_dtype(value)
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, enum.Enum):
        return value.value
    return value


def is_same_value(first: object, second: object) -> bool:
    """Return whether two values are equal and of the same kind: True is not 1.

    A value whose __eq__ raises is equal to itself alone.
    """
    if first is second:
        return True
    if isinstance(first, bool) != isinstance(second, bool):
        return False
    try:
        return bool(first == second)
    except Exception:  # noqa: BLE001  arrays and mocks may refuse to be compared
        return False


def get_values_before_sync(role: str, target: Any) -> Mapping[str, Any]:
    """Return the attributes of an object as they were before any sync wrote to it."""
    attributes = get_attributes(role, target)
    if SYNC_MEMORY_ATTRIBUTE not in attributes:
        return attributes
    owner = Owner(role, target)
    return {name: owner.own(name) for name in OWNER_FIELDS[role] if name in attributes}


def unwrap_config(target: Any) -> Any:
    """Return the Megatron config behind an object that only hands attributes on, or the object itself.

    The model configs of Megatron-LM's and Megatron Bridge's builders hold a `transformer` and
    nothing of precision.
    """
    transformer = getattr(target, "__dict__", {}).get("transformer")
    if _is_model_config(transformer) and not _is_model_config(target):
        return transformer
    return target


def _is_model_config(target: Any) -> bool:
    return any(
        base.__name__ == OWNER_CLASS_NAMES["model"] for base in _list_megatron_classes(type(target))
    )


@functools.cache
def find_annotated_class(cls: type, attribute: str) -> type | None:
    """Return the class of the objects that a field holds, by its annotation; None where it names no single class."""
    annotation = typing.get_type_hints(cls).get(attribute)
    alternatives = typing.get_args(annotation) or (annotation,)
    members = [member for member in alternatives if member is not type(None)]
    if len(members) == 1 and isinstance(members[0], type):
        return members[0]
    return None


@functools.cache
def get_class_defaults(cls: type) -> dict[str, Any]:
    """Return the defaults of the fields of a dataclass that a plan reads."""
    if not dataclasses.is_dataclass(cls):
        return {}
    defaults = {}
    for field_ in dataclasses.fields(cls):
        if field_.name in PLANNED_ATTRIBUTES:
            default = get_field_default(field_)
            if default is not dataclasses.MISSING:
                defaults[field_.name] = default
    return defaults
