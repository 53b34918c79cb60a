"""`read_stated_precision`: the `mixed_precision` of a followed program's container, as far as the program states it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bridge.precision.coercion import DTYPE_SPELLINGS
from bridge.read.megatron_bridge.exporter import PARAM_FIELD_ALIASES
from bridge.read.megatron_bridge.modelled_calls import PRECISION_CLASS, RECIPE_ORIGIN
from bridge.read.megatron_bridge.plain_data import convert_to_plain, get_decider, has_open
from bridge.read.megatron_bridge.saved_container import TARGET_KEY
from bridge.read.megatron_bridge.values import ImportedName, Object, Value
from bridge.read.run_keys import PRECISION_KEY
from bridge.registry.registry import REGISTRY

UNREGISTERED_RECIPE = "the recipe {name!r}, which is not registered here,"
NOT_A_PRECISION = "the value {value!r}, which is no precision,"
SOURCE_NOT_AT_HAND = "`{path}`, whose source is not at hand,"


@dataclass(frozen=True, kw_only=True)
class StatedPrecision:
    """A precision, as far as a program states it."""

    name: str = ""
    """The recipe's, where nothing was assigned to its fields; empty: the fields state the precision."""
    values: Mapping[str, object] = field(default_factory=dict)
    """Fields of the precision, with its class as `_target_` where the constructor decides how they are read."""
    open_fields: Mapping[str, str] = field(default_factory=dict)
    """Field -> what decides it."""
    decider: str = ""
    """What decides the fields that are not stated, as a noun; empty: the defaults of the class."""
    is_absent: bool = False
    """The container has no precision, so that the model decides it."""
    unknown_functions: tuple[str, ...] = ()
    """Functions whose source is not at hand that may change the precision afterwards."""


def read_stated_precision(container: Object) -> StatedPrecision:
    """Return the precision of a container."""
    stated = container.fields.get(PRECISION_KEY)
    if stated is None:
        is_absent = not container.decider
        strangers = tuple(container.unknown_functions)
        return StatedPrecision(
            decider=container.decider, is_absent=is_absent, unknown_functions=strangers
        )
    strangers = tuple(container.unknown_functions[stated.earlier_unknown_functions :])
    value = stated.value
    if isinstance(value, Object):
        return _read_object(value, strangers=(*strangers, *value.unknown_functions))
    if isinstance(value, ImportedName):
        return StatedPrecision(
            decider=SOURCE_NOT_AT_HAND.format(path=value.path), unknown_functions=strangers
        )
    if value is None:
        return StatedPrecision(is_absent=True, unknown_functions=strangers)
    if not isinstance(value, str):
        return StatedPrecision(
            decider=NOT_A_PRECISION.format(value=convert_to_plain(value)),
            unknown_functions=strangers,
        )
    if value not in REGISTRY:
        return StatedPrecision(
            decider=UNREGISTERED_RECIPE.format(name=value), unknown_functions=strangers
        )
    return StatedPrecision(name=value, unknown_functions=strangers)


def _read_object(precision: Object, strangers: tuple[str, ...]) -> StatedPrecision:
    """Return the precision that an object states."""
    if precision.recipe and _is_untouched(precision):
        return StatedPrecision(name=precision.recipe, unknown_functions=strangers)
    values: dict[str, object] = {}
    open_fields: dict[str, str] = {}
    for name, stated in precision.fields.items():
        decider = _maybe_decider(stated.value)
        if decider is not None and not stated.origin:
            continue  # it is only read
        if decider is None:
            values[name] = convert_to_plain(stated.value)
        else:
            open_fields[name] = decider
    if precision.kind and not precision.recipe and not _assigns_alias(precision):
        values = {TARGET_KEY: PRECISION_CLASS, **values}
    return StatedPrecision(
        values=values,
        open_fields=open_fields,
        decider=precision.decider,
        unknown_functions=strangers,
    )


def _maybe_decider(value: Value) -> str | None:
    """Return what decides the value of a field; None where the program states it."""
    if has_open(value):
        return get_decider(value)
    if (
        isinstance(value, ImportedName) and convert_to_plain(value) == value.path
    ):  # no member of an enum
        name = value.path.removeprefix("torch.")
        if name not in DTYPE_SPELLINGS:
            return SOURCE_NOT_AT_HAND.format(path=value.path)
    return None


def _is_untouched(precision: Object) -> bool:
    """Return whether each field is the recipe's."""
    origin = RECIPE_ORIGIN.format(name=precision.recipe)
    return all(stated.origin == origin for stated in precision.fields.values())


def _assigns_alias(precision: Object) -> bool:
    """Return whether a statement assigns a name of stored weights, which a constructor reads otherwise."""
    for name in (*PARAM_FIELD_ALIASES, *PARAM_FIELD_ALIASES.values()):
        stated = precision.fields.get(name)
        if stated is not None and stated.origin.endswith(f".{name}"):
            return True
    return False
