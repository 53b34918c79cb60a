"""`stated_precision`: the `mixed_precision` of a followed program's container, as far as the program states it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bridge.precision.values import SPELLINGS
from bridge.read.keys import PRECISION
from bridge.read.megatron_bridge.exporter import TWINS
from bridge.read.megatron_bridge.modelled_calls import CONFIG, RECIPE_ORIGIN
from bridge.read.megatron_bridge.plain_data import decider_of, has_open, plain
from bridge.read.megatron_bridge.run import TARGET
from bridge.read.megatron_bridge.values import ImportedName, Object, Value
from bridge.registry.registry import REGISTRY

UNREGISTERED = "the recipe {name!r}, which is not registered here,"
WRONG = "the value {value!r}, which is no precision,"
ELSEWHERE = "`{path}`, whose source is not at hand,"


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
    strangers: tuple[str, ...] = ()
    """Functions whose source is not at hand that may change the precision afterwards."""


def stated_precision(container: Object) -> StatedPrecision:
    """Return the precision of a container."""
    stated = container.fields.get(PRECISION)
    if stated is None:
        is_absent = not container.decider
        strangers = tuple(container.strangers)
        return StatedPrecision(decider=container.decider, is_absent=is_absent, strangers=strangers)
    strangers = tuple(container.strangers[stated.earlier_strangers :])
    value = stated.value
    if isinstance(value, Object):
        return _of_object(value, strangers=(*strangers, *value.strangers))
    if isinstance(value, ImportedName):
        return StatedPrecision(decider=ELSEWHERE.format(path=value.path), strangers=strangers)
    if value is None:
        return StatedPrecision(is_absent=True, strangers=strangers)
    if not isinstance(value, str):
        return StatedPrecision(decider=WRONG.format(value=plain(value)), strangers=strangers)
    if value not in REGISTRY:
        return StatedPrecision(decider=UNREGISTERED.format(name=value), strangers=strangers)
    return StatedPrecision(name=value, strangers=strangers)


def _of_object(precision: Object, strangers: tuple[str, ...]) -> StatedPrecision:
    """Return the precision that an object states."""
    if precision.recipe and _is_untouched(precision):
        return StatedPrecision(name=precision.recipe, strangers=strangers)
    values: dict[str, object] = {}
    open_fields: dict[str, str] = {}
    for name, stated in precision.fields.items():
        decider = _maybe_decider(stated.value)
        if decider is not None and not stated.origin:
            continue  # it is only read
        if decider is None:
            values[name] = plain(stated.value)
        else:
            open_fields[name] = decider
    if precision.kind and not precision.recipe and not _assigns_twin(precision):
        values = {TARGET: CONFIG, **values}
    return StatedPrecision(
        values=values,
        open_fields=open_fields,
        decider=precision.decider,
        strangers=strangers,
    )


def _maybe_decider(value: Value) -> str | None:
    """Return what decides the value of a field; None where the program states it."""
    if has_open(value):
        return decider_of(value)
    if isinstance(value, ImportedName) and plain(value) == value.path:  # no member of an enum
        name = value.path.removeprefix("torch.")
        if name not in SPELLINGS:
            return ELSEWHERE.format(path=value.path)
    return None


def _is_untouched(precision: Object) -> bool:
    """Return whether each field is the recipe's."""
    origin = RECIPE_ORIGIN.format(name=precision.recipe)
    return all(stated.origin == origin for stated in precision.fields.values())


def _assigns_twin(precision: Object) -> bool:
    """Return whether a statement assigns a name of stored weights, which a constructor reads otherwise."""
    for name in (*TWINS, *TWINS.values()):
        stated = precision.fields.get(name)
        if stated is not None and stated.origin.endswith(f".{name}"):
            return True
    return False
