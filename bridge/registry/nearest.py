"""The recipe that a precision without a name is nearest to, and the fields in which it differs from it.

    nearest_label(config)    # "bf16_with_mxfp8_mixed, but grad_reduce_in_fp32=False"

A config that another program saved states every field and names no recipe. A reader knows it by the recipe it is.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from bridge.errors import BridgeWarning
from bridge.precision.config import FIELDS, MODE_SWITCHES, PrecisionConfig
from bridge.precision.mode import fields_in_words, label_of, low_format_of, mode_of, scheme_of
from bridge.precision.statements import field_names, field_value, recipe_name
from bridge.registry.registry import REGISTRY
from bridge.rules.inert import inert_fields

OF_THE_MODE = ("params_dtype", "pipeline_dtype", "autocast_dtype")
"""Dtypes that are those of the mode where nothing states them."""
SECOND_NAMES = tuple(
    name for name, field in FIELDS.items() if field.twin is not None and not field.leads
)
"""Second names of settings that have two."""
LONGEST = 3
"""Fields that a label without a recipe still lists by themselves."""


def nearest_label(config: PrecisionConfig) -> str:
    """Return the label of a config; one that states many fields without a recipe's name is named by the nearest."""
    if recipe_name(config) is not None or len(config.stated) <= LONGEST:
        return label_of(config)
    name = nearest_recipe(config)
    if name is None:
        return label_of(config)
    found = differing_fields(config, _made(name))
    if not found:
        return name
    return f"{name}, but {fields_in_words(config, found)}"


def label_of_owners(model: Mapping[str, Any]) -> str:
    """Return the label of a run without a recipe: mode and scheme as the model's config holds them."""
    mode = "fp32"
    if model["bf16"]:
        mode = "bf16"
    elif model["fp16"]:
        mode = "fp16"
    for family in ("fp8", "fp4"):
        if model[family]:
            scheme = model[f"{family}_recipe"]
            return f"{mode} with {family} {scheme}, without a recipe"
    return f"{mode}, without a recipe"


def nearest_recipe(config: PrecisionConfig) -> str | None:
    """Return the recipe of the same mode, format and scheme with the fewest other differences; None: there is none."""
    nearest, fewest = None, 0
    for recipe in REGISTRY.recipes():
        made = _made(recipe.name)
        if not compute_alike(made, config):
            continue
        number = len(differing_fields(config, made))
        if nearest is None or number < fewest:
            nearest, fewest = recipe.name, number
    return nearest


def differing_fields(config: PrecisionConfig, recipe: PrecisionConfig) -> list[str]:
    """Return the fields that act in one of two runs and read otherwise there, in order of declaration."""
    without_effect = inert_fields(config).keys() & inert_fields(recipe).keys()
    ignored = {*MODE_SWITCHES, *SECOND_NAMES, *without_effect}
    found = []
    for name in field_names(config):
        if name not in ignored and _reading(config, name) != _reading(recipe, name):
            found.append(name)
    return found


def _made(name: str) -> PrecisionConfig:
    """Return a recipe for a comparison, without the warnings of its function."""
    with warnings.catch_warnings(action="ignore", category=BridgeWarning):
        return REGISTRY.get(name)


def compute_alike(one: PrecisionConfig, other: PrecisionConfig) -> bool:
    """Return whether two configs have the same mode, low-precision format and scaling scheme."""
    if mode_of(one) != mode_of(other) or low_format_of(one) != low_format_of(other):
        return False
    return scheme_of(one) == scheme_of(other)


def _reading(config: PrecisionConfig, name: str) -> object:
    value = field_value(config, name)
    if value is None and name in OF_THE_MODE:
        return mode_of(config)
    return value
