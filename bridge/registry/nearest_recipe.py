"""The recipe that is nearest to a precision without a recipe name, and the differing fields.

    format_nearest_label(config)    # "bf16_with_mxfp8_mixed, but grad_reduce_in_fp32=False"

A config that another program saved states every field and names no recipe. The name of the nearest
recipe tells a reader more than the list of fields.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from bridge.errors import BridgeWarning
from bridge.precision.mode import (
    MODE_DTYPE_FIELDS,
    format_fields,
    format_label,
    get_low_precision_format,
    get_mode,
    get_scheme,
)
from bridge.precision.precision_config import FIELDS, MODE_SWITCHES, PrecisionConfig
from bridge.precision.statements import get_field_value, get_recipe_name, list_field_names
from bridge.registry.registry import REGISTRY
from bridge.rules.inert_fields import find_inert_fields


def _list_second_names() -> tuple[str, ...]:
    names: list[str] = []
    for name, field in FIELDS.items():
        if field.twin is not None and not field.leads:
            names.append(name)
    return tuple(names)


SECOND_NAMES = _list_second_names()
"""The second name of each setting that has two names."""
MAX_LISTED_FIELDS = 3
"""The largest number of stated fields that a label lists without naming a recipe."""


def format_nearest_label(config: PrecisionConfig) -> str:
    """Return the label of a config. Many fields without a recipe are named by the nearest recipe."""
    if get_recipe_name(config) is not None or len(config.stated) <= MAX_LISTED_FIELDS:
        return format_label(config)
    name = find_nearest_recipe(config)
    if name is None:
        return format_label(config)
    differing = list_differing_fields(config, _get_recipe_quietly(name))
    if not differing:
        return name
    return f"{name}, but {format_fields(config, differing)}"


def format_owner_label(model: Mapping[str, Any]) -> str:
    """Return the label of a run without a recipe: the mode and the scheme of its model config."""
    return f"{format_mode_and_scheme(model)}, without a recipe"


def format_mode_and_scheme(model: Mapping[str, Any]) -> str:
    """Return the mode and the scheme of a model config, such as "bf16 with fp8 tensorwise"."""
    mode = "fp32"
    if model["bf16"]:
        mode = "bf16"
    elif model["fp16"]:
        mode = "fp16"
    for family in ("fp8", "fp4"):
        if model[family]:
            scheme = model[f"{family}_recipe"]
            return f"{mode} with {family} {scheme}"
    return mode


def find_nearest_recipe(config: PrecisionConfig) -> str | None:
    """Return the name of the recipe with the fewest differing fields.

    It must have the same mode, format and scheme. The result is None if no recipe has.
    """
    nearest: str | None = None
    fewest = 0
    for recipe in REGISTRY.recipes():
        other = _get_recipe_quietly(recipe.name)
        if not has_same_computation(other, config):
            continue
        count = len(list_differing_fields(config, other))
        if nearest is None or count < fewest:
            nearest, fewest = recipe.name, count
    return nearest


def list_differing_fields(config: PrecisionConfig, recipe: PrecisionConfig) -> list[str]:
    """Return the differing fields that have an effect in one of the two runs, in order of declaration."""
    without_effect = find_inert_fields(config).keys() & find_inert_fields(recipe).keys()
    ignored = {*MODE_SWITCHES, *SECOND_NAMES, *without_effect}
    differing: list[str] = []
    for name in list_field_names(config):
        if name in ignored:
            continue
        if _get_effective_value(config, name) != _get_effective_value(recipe, name):
            differing.append(name)
    return differing


def _get_recipe_quietly(name: str) -> PrecisionConfig:
    """Return a recipe for a comparison, without the warnings of its function."""
    with warnings.catch_warnings(action="ignore", category=BridgeWarning):
        return REGISTRY.get(name)


def has_same_computation(first: PrecisionConfig, second: PrecisionConfig) -> bool:
    """Return whether two configs have the same mode, low-precision format and scaling scheme."""
    if get_mode(first) != get_mode(second):
        return False
    if get_low_precision_format(first) != get_low_precision_format(second):
        return False
    return get_scheme(first) == get_scheme(second)


def _get_effective_value(config: PrecisionConfig, name: str) -> object:
    value = get_field_value(config, name)
    if value is None and name in MODE_DTYPE_FIELDS:
        return get_mode(config)
    return value
