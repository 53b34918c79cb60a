"""`read_stated_precision`: the `mixed_precision` of a followed program's container, as far as it is known.

precision = read_stated_precision(container)
precision.values, precision.open_fields    # {"bf16": True}, {"fp8": "`flag`"}
"""

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
    """The name of a recipe without changed fields; empty if the fields state the precision."""
    values: Mapping[str, object] = field(default_factory=dict)
    """Fields of the precision. It has its class as `_target_` if a constructor call reads the fields."""
    open_fields: Mapping[str, str] = field(default_factory=dict)
    """Field with an open value -> the source that decides it."""
    decider: str = ""
    """The source that decides the fields which are not stated; empty if the defaults of the class do."""
    is_absent: bool = False
    """Whether the container has no precision, so that the model decides it."""
    unknown_functions: tuple[str, ...] = ()
    """Functions without source that get the precision afterwards and may change it."""


def read_stated_precision(container: Object) -> StatedPrecision:
    """Return the precision of a container."""
    stated = container.fields.get(PRECISION_KEY)
    if stated is None:
        return StatedPrecision(
            decider=container.decider,
            is_absent=not container.decider,
            unknown_functions=tuple(container.unknown_functions),
        )
    later_functions = tuple(container.unknown_functions[stated.earlier_unknown_functions :])
    value = stated.value
    if isinstance(value, Object):
        return _read_object(value, (*later_functions, *value.unknown_functions))
    if value is None:
        return StatedPrecision(is_absent=True, unknown_functions=later_functions)
    if isinstance(value, str) and value in REGISTRY:
        return StatedPrecision(name=value, unknown_functions=later_functions)
    return StatedPrecision(decider=_describe_unread_value(value), unknown_functions=later_functions)


def _describe_unread_value(value: Value) -> str:
    """Return the name of a value that is no precision, as the decider of one."""
    if isinstance(value, ImportedName):
        return SOURCE_NOT_AT_HAND.format(path=value.path)
    if isinstance(value, str):
        return UNREGISTERED_RECIPE.format(name=value)
    return NOT_A_PRECISION.format(value=convert_to_plain(value))


def _read_object(precision: Object, unknown_functions: tuple[str, ...]) -> StatedPrecision:
    """Return the precision that an object states.

    Args:
        unknown_functions: Functions without source that may change it.
    """
    if precision.recipe and _is_unchanged_recipe(precision):
        return StatedPrecision(name=precision.recipe, unknown_functions=unknown_functions)
    values: dict[str, object] = {}
    open_fields: dict[str, str] = {}
    for name, stated in precision.fields.items():
        decider = _find_decider(stated.value)
        if decider is None:
            values[name] = convert_to_plain(stated.value)
        elif stated.origin:  # an open field without a statement was only read
            open_fields[name] = decider
    if precision.kind and not precision.recipe and not _assigns_alias(precision):
        values = {TARGET_KEY: PRECISION_CLASS, **values}
    return StatedPrecision(
        values=values,
        open_fields=open_fields,
        decider=precision.decider,
        unknown_functions=unknown_functions,
    )


def _find_decider(value: Value) -> str | None:
    """Return the source that decides the value of a field; None if the value is known.

    The name of a dtype, and of the member of an enum, is known without the source of its module.
    """
    if has_open(value):
        return get_decider(value)
    if not isinstance(value, ImportedName) or convert_to_plain(value) != value.path:
        return None
    if value.path.removeprefix("torch.") in DTYPE_SPELLINGS:
        return None
    return SOURCE_NOT_AT_HAND.format(path=value.path)


def _is_unchanged_recipe(precision: Object) -> bool:
    """Return whether each field of a precision is that of its recipe."""
    origin = RECIPE_ORIGIN.format(name=precision.recipe)
    return all(stated.origin == origin for stated in precision.fields.values())


def _assigns_alias(precision: Object) -> bool:
    """Return whether a statement assigns one of the two names of stored weights.

    The constructor of the class reads the two names otherwise than assignments do.
    """
    for name in (*PARAM_FIELD_ALIASES, *PARAM_FIELD_ALIASES.values()):
        stated = precision.fields.get(name)
        if stated is not None and stated.origin.endswith(f".{name}"):
            return True
    return False
