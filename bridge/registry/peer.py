"""Megatron Bridge's `MixedPrecisionConfig`, read into ours.

A program can use recipes and model providers of Megatron Bridge together with this package. Objects
of Megatron Bridge's class are recognised by the name of their class, and read without importing it.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol, TypeGuard

from bridge.errors import UnknownFieldError
from bridge.precision.precision_config import FIELDS, MODE_SWITCHES, PrecisionConfig
from bridge.precision.stated_field import LAYER_COUNTS, get_field_default
from bridge.precision.statements import (
    check_value,
    get_field_value,
    get_stated_values,
    list_field_names,
    mark_ambiguous_fields,
)
from bridge.registry.mixed_precision_config import MixedPrecisionConfig

PEER_SOURCE = "Megatron Bridge's config"
MIRRORED_FIELDS = ("fp8_param", "fp4_param")
"""Fields that Megatron Bridge's class fills from the gather field of the same family in `finalize`."""


class PeerConfig(Protocol):
    """An object of Megatron Bridge's `MixedPrecisionConfig`, or of a subclass of it."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


def is_peer_config(value: object) -> TypeGuard[PeerConfig]:
    """Return whether an object is of Megatron Bridge's dataclass `MixedPrecisionConfig`."""
    if not dataclasses.is_dataclass(type(value)):
        return False
    for base in type(value).__mro__:
        is_of_peer = f"{base.__module__}.".startswith("megatron.bridge.")
        if is_of_peer and base.__name__ == "MixedPrecisionConfig":
            return True
    return False


def from_peer(config: PeerConfig, recipes: Iterable[PrecisionConfig] = ()) -> MixedPrecisionConfig:
    """Return the config that an object of Megatron Bridge's class describes.

    The object does not record which fields were stated. These fields count as stated:

    - the mode switches, and the scheme of a format that is on;
    - both counts of kept layers, if one of them differs from its default;
    - every other field that differs from its default;
    - every field that differs from the recipe, if the object was made from a recipe.

    If the object was made without a recipe, a field at its default may have been stated too. Such
    fields are marked as ambiguous.

    Args:
        config: The object.
        recipes: Recipes that the object may have been made from.

    Raises:
        UnknownFieldError: A field that differs from its default has no counterpart here.
    """
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    stated = _find_non_default_fields(config, values)
    changed = _find_changes_to_recipe(values, recipes)
    if changed is not None:
        stated.update(changed)
    stated.difference_update(MIRRORED_FIELDS)
    known = list_field_names(MixedPrecisionConfig)
    unknown = stated.difference(known)
    if unknown:
        name = min(unknown)
        rule = "is a field of Megatron Bridge's config that has no counterpart here"
        raise UnknownFieldError(
            f"mixed_precision.{name}: {rule}, got {values[name]!r:.80}. Leave it at its default."
        )
    in_order = {name: values[name] for name in known if name in stated}
    precision = MixedPrecisionConfig().override(PEER_SOURCE, **in_order)
    if changed is None:
        mark_ambiguous_fields(precision, frozenset(values) - stated - {*MIRRORED_FIELDS})
    return precision


def _find_non_default_fields(config: PeerConfig, values: Mapping[str, Any]) -> set[str]:
    """Return the fields that count as stated because of their values."""
    stated: set[str] = set()
    for field in dataclasses.fields(config):
        if values[field.name] != get_field_default(field) or field.name in MODE_SWITCHES:
            stated.add(field.name)
    for family in ("fp8", "fp4"):
        if values.get(family):
            stated.add(f"{family}_recipe")
    if stated.intersection(LAYER_COUNTS):
        stated.update(LAYER_COUNTS)
    return stated


def _find_changes_to_recipe(
    values: Mapping[str, Any], recipes: Iterable[PrecisionConfig]
) -> list[str] | None:
    """Return the fields that differ from the recipe that an object was made from.

    The recipe has the fewest differing fields. They must be fewer than half of the fields in which
    the recipe differs from the defaults. The result is None if there is no such recipe.
    """
    nearest: list[str] | None = None
    for recipe in recipes:
        recipe_field_count = 0
        for name, value in get_stated_values(recipe).items():
            if value != FIELDS[name].default:
                recipe_field_count += 1
        changed: list[str] = []
        for name, value in values.items():
            if name not in FIELDS or name in MIRRORED_FIELDS:
                continue
            if check_value(recipe, name, value) != get_field_value(recipe, name):
                changed.append(name)
        is_alike = 2 * len(changed) < recipe_field_count
        if is_alike and (nearest is None or len(changed) < len(nearest)):
            nearest = changed
    return nearest
