"""Megatron Bridge's `MixedPrecisionConfig`, read into ours.

Recipes and model providers stay with Megatron Bridge, so its class meets ours in one program. Its objects are
recognised by their class, and read without importing it.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol, TypeGuard

from bridge.errors import UnknownFieldError
from bridge.precision.config import FIELDS, MODE_SWITCHES, PrecisionConfig
from bridge.precision.fields import LAYER_COUNTS, default_of
from bridge.precision.statements import (
    check_value,
    field_names,
    field_value,
    mark_untold,
    stated_values,
)
from bridge.registry.config import MixedPrecisionConfig

SOURCE = "Megatron Bridge's config"
FOLLOWING = ("fp8_param", "fp4_param")
"""Fields that the peer's class keeps equal to the gather of the same family, and leaves None until `finalize`."""


class PeerConfig(Protocol):
    """An object of Megatron Bridge's `MixedPrecisionConfig`, or of a subclass of it."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


def is_peer_config(value: object) -> TypeGuard[PeerConfig]:
    """Return whether `value` is an object of a dataclass `MixedPrecisionConfig` of a module of `megatron.bridge`."""
    if not dataclasses.is_dataclass(type(value)):
        return False
    for base in type(value).__mro__:
        if base.__name__ == "MixedPrecisionConfig" and f"{base.__module__}.".startswith(
            "megatron.bridge."
        ):
            return True
    return False


def from_peer(config: PeerConfig, recipes: Iterable[PrecisionConfig] = ()) -> MixedPrecisionConfig:
    """Return the config that an object of Megatron Bridge's class describes.

    Stated are the mode switches, the scheme of a format that is on, both counts of kept layers where one was given, and
    every other field away from the peer's default. Of an object that was made from one of `recipes` every field is
    stated that differs from the recipe. In any other object a default may have been given: the field is `untold`.
    """
    values: dict[str, Any] = {}
    given: set[str] = set()
    for field in dataclasses.fields(config):
        values[field.name] = getattr(config, field.name)
        if values[field.name] != default_of(field) or field.name in MODE_SWITCHES:
            given.add(field.name)
    for family in ("fp8", "fp4"):
        if values.get(family):
            given.add(f"{family}_recipe")
    if given.intersection(LAYER_COUNTS):
        given.update(LAYER_COUNTS)
    changed = _changed_in_recipe(values, recipes)
    if changed is not None:
        given.update(changed)
    given.difference_update(FOLLOWING)
    known = field_names(MixedPrecisionConfig)
    unknown = given.difference(known)
    if unknown:
        name = min(unknown)
        rule = "is a field of Megatron Bridge's config that has no counterpart here"
        raise UnknownFieldError(
            f"mixed_precision.{name}: {rule}, got {values[name]!r:.80}. Leave it at its default."
        )
    stated = {name: values[name] for name in known if name in given}
    made = MixedPrecisionConfig().override(SOURCE, **stated)
    if changed is None:
        mark_untold(made, frozenset(values) - given - {*FOLLOWING})
    return made


def _changed_in_recipe(
    values: Mapping[str, Any], recipes: Iterable[PrecisionConfig]
) -> list[str] | None:
    """Return the fields that differ from the recipe that an object was made from; None where it is like no recipe.

    It is like a recipe that it differs from in fewer than half as many fields as the recipe states of its own.
    """
    nearest: list[str] | None = None
    for recipe in recipes:
        stated = stated_values(recipe)
        away_from_default = [
            name for name, value in stated.items() if value != FIELDS[name].default
        ]
        changed = []
        for name, value in values.items():
            if name not in FIELDS or name in FOLLOWING:
                continue
            if check_value(recipe, name, value) != field_value(recipe, name):
                changed.append(name)
        is_alike = 2 * len(changed) < len(away_from_default)
        if is_alike and (nearest is None or len(changed) < len(nearest)):
            nearest = changed
    return nearest
