"""One config object of Megatron (or anything like it), seen with its defaults and with what was its own.

`MappingOwner` is such a config as a dictionary, so that a plan needs neither its class nor torch.
"""

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any

from bridge.precision.config import PrecisionConfig
from bridge.precision.dtypes import torch_dtype
from bridge.precision.fields import default_of
from bridge.rules.fields import DEFAULTS, FIELDS
from bridge.rules.section import attributes_of
from bridge.rules.versions import Version, parse_version
from bridge.sync.routes import OWNERS

WRITTEN = "_precision_bridge_written"
"""Name under which an owner remembers what a sync wrote: {attribute: (value written, the owner's own value)}."""


class _Absent:
    def __repr__(self) -> str:
        return "<absent>"


COMPUTED = {"autocast_dtype": "params_dtype"}
"""Attribute that Megatron fills in from another one where it is not given."""

ABSENT = _Absent()
"""Stands for the value of an attribute that is not there."""


class Owner:
    """An object in a role.

    Args:
        role: model, optimizer, ddp or train; "config" for an object of which nothing is known.
        target: The object, or one that holds it as its `transformer` and hands attributes on to it.
    """

    def __init__(self, role: str, target: Any) -> None:
        self.role = role
        self.target = seen_through(target)
        self.defining: Any = _defining_class(type(self.target))
        self.defaults: Mapping[str, Any] = _defaults(self.defining)
        self.is_megatron = self.defining.__module__.startswith("megatron.core")
        self.class_name = type(self.target).__name__

    @property
    def is_deferred(self) -> bool:
        """Whether Megatron's `__post_init__` waits for a call of `finalize`, as in the classes of Megatron Bridge."""
        cls = type(self.target)
        waits = getattr(cls, "__post_init__", None) is not getattr(self.defining, "__post_init__", None)
        return self.is_megatron and waits and callable(getattr(cls, "finalize", None))

    def has(self, attribute: str) -> bool:
        """Return whether the object has the attribute."""
        return hasattr(self.target, attribute)

    def value(self, attribute: str) -> Any:
        """Return what the object holds now."""
        return getattr(self.target, attribute, ABSENT)

    def own(self, attribute: str) -> Any:
        """Return what the object held before any sync wrote to it, unless it was changed since."""
        written = vars(self.target).get(WRITTEN, {}) if hasattr(self.target, "__dict__") else {}
        if isinstance(written, dict) and attribute in written and same(written[attribute][0], self.value(attribute)):
            return written[attribute][1]
        return self.value(attribute)

    def is_own(self, attribute: str) -> bool:
        """Return whether the value was set: it differs from Megatron's own class default."""
        own = self.own(attribute)
        if attribute not in self.defaults or same(own, self.defaults[attribute]):
            return False
        source = COMPUTED.get(attribute)  # a value that Megatron computed is not the owner's own
        return source is None or not same(own, self.own(source))

    def class_of(self, attribute: str) -> type | None:
        """Return the class whose objects a field of Megatron's own config holds; None for another owner's field."""
        return _annotated(self.defining, attribute) if self.is_megatron else None

    def dtype(self, token: str) -> Any:
        """Return the dtype that `token` names, in the form that the owner holds."""
        return torch_dtype(token)

    def reading(self, config: PrecisionConfig, field: str) -> Any:
        """Return what a field of `config` reads as, in the form that the owner holds."""
        return getattr(config, field)

    def remember(self, written: dict[str, Any], own: dict[str, Any]) -> None:
        """Note what a sync wrote and what was there before: the next sync starts from the owner's own values."""
        if not hasattr(self.target, "__dict__"):
            return
        earlier = vars(self.target).get(WRITTEN)
        record = dict(earlier) if isinstance(earlier, dict) else {}
        record.update({attribute: (value, own[attribute]) for attribute, value in written.items()})
        if record:
            vars(self.target)[WRITTEN] = record


def same(one: object, two: object) -> bool:
    """Return whether two values are equal and of one kind (True is not 1), without trusting foreign __eq__."""
    if one is two:
        return True
    if isinstance(one, bool) != isinstance(two, bool):
        return False
    try:
        return bool(one == two)
    except Exception:  # noqa: BLE001  arrays and mocks may refuse to be compared
        return False


def own_values(role: str, target: Any) -> Mapping[str, Any]:
    """Return the attributes of an object as they were before any sync wrote to it."""
    given = attributes_of(role, target)
    if WRITTEN not in given:
        return given
    before = Owner(role, target)
    return {name: before.own(name) for name in FIELDS[role] if name in given}


def seen_through(target: Any) -> Any:
    """Return the Megatron config behind one that only hands attributes on to it, or `target` itself.

    The model configs of Megatron-LM's and Megatron Bridge's builders hold a `transformer` and nothing of precision.
    """
    held = getattr(target, "__dict__", {}).get("transformer") if not is_model_config(target) else None
    return held if is_model_config(held) else target


def is_model_config(target: Any) -> bool:
    """Return whether `target` is an object of Megatron's `TransformerConfig` or of a subclass of it."""
    bases = type(target).__mro__
    return any(base.__name__ == "TransformerConfig" and base.__module__.startswith("megatron.core") for base in bases)


def _defining_class(cls: type) -> type:
    """Return Megatron's own class behind a subclass (a model provider, say), or the class itself."""
    return next((base for base in cls.__mro__ if base.__module__.startswith("megatron.core")), cls)


@functools.cache
def _annotated(cls: type, attribute: str) -> type | None:
    """Return the class in the annotation of a dataclass field, Optional[...] or not."""
    annotation = typing.get_type_hints(cls).get(attribute)
    members = [member for member in typing.get_args(annotation) or (annotation,) if member is not type(None)]
    return members[0] if len(members) == 1 and isinstance(members[0], type) else None


@functools.cache
def _defaults(cls: type) -> dict[str, Any]:
    if not dataclasses.is_dataclass(cls):
        return {}
    defaults = {field.name: default_of(field) for field in dataclasses.fields(cls)}
    return {name: default for name, default in defaults.items() if default is not dataclasses.MISSING}


class MappingOwner(Owner):
    """The values of one of Megatron's configs, dtypes as tokens.

    The version of megatron-core decides about the fields that are there; None: all of them.
    """

    is_deferred = False

    def __init__(self, role: str, values: dict[str, Any], version: Version | None = None) -> None:
        self.role = role
        self.target = values
        self.defaults = DEFAULTS[role]
        self.is_megatron = True
        self.class_name = OWNERS[role]
        self._missing = _missing(role, str(version) if version is not None else None)

    def has(self, attribute: str) -> bool:
        """Return whether this version of the class has the attribute."""
        return attribute in self.target and attribute not in self._missing

    def value(self, attribute: str) -> Any:
        """Return the value; it is the owner's own, since no sync writes to a mapping."""
        return self.target[attribute] if self.has(attribute) else ABSENT

    own = value

    def class_of(self, attribute: str) -> None:
        """Return None: a mapping holds plain data."""

    def dtype(self, token: str) -> str:
        """Return the token itself."""
        return token

    def reading(self, config: PrecisionConfig, field: str) -> Any:
        """Return what a field reads as, a dtype as its token."""
        return config.reading(field)


@functools.cache
def _missing(role: str, version: str | None) -> frozenset[str]:
    """Return the fields that this version of the class does not have yet; by its text, since 0.17 equals 0.17.0."""
    held = parse_version(version) if version is not None else None
    rows = FIELDS[role].values()
    return frozenset(row.name for row in rows if row.has is not None and row.has.holds(held) is False)
