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

DTYPES_OF_THE_MODE = ("params_dtype", "pipeline_dtype", "autocast_dtype")
"""Dtypes that are those of the mode where nothing states them."""


def _second_names() -> tuple[str, ...]:
    names: list[str] = []
    for name, field in FIELDS.items():
        if field.twin is not None and not field.leads:
            names.append(name)
    return tuple(names)


SECOND_NAMES = _second_names()
"""Second names of settings that have two."""
LONGEST = 3
"""Fields that a label without a recipe still lists by themselves."""


def nearest_label(config: PrecisionConfig) -> str:
    """Return the label of a config; many fields without a recipe's name are named by the nearest recipe."""
    if recipe_name(config) is not None or len(config.stated) <= LONGEST:
        return label_of(config)
    name = nearest_recipe(config)
    if name is None:
        return label_of(config)
    differing = differing_fields(config, _quiet_recipe(name))
    if not differing:
        return name
    return f"{name}, but {fields_in_words(config, differing)}"


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
    """Return the name of the recipe of the same mode, format and scheme with the fewest other differences.

    It is None where no recipe has the same mode, format and scheme.
    """
    nearest: str | None = None
    fewest = 0
    for recipe in REGISTRY.recipes():
        other = _quiet_recipe(recipe.name)
        if not compute_alike(other, config):
            continue
        count = len(differing_fields(config, other))
        if nearest is None or count < fewest:
            nearest, fewest = recipe.name, count
    return nearest


def differing_fields(config: PrecisionConfig, recipe: PrecisionConfig) -> list[str]:
    """Return the fields whose values differ and act in either run, in order of declaration."""
    without_effect = inert_fields(config).keys() & inert_fields(recipe).keys()
    ignored = {*MODE_SWITCHES, *SECOND_NAMES, *without_effect}
    differing: list[str] = []
    for name in field_names(config):
        if name not in ignored and _reading(config, name) != _reading(recipe, name):
            differing.append(name)
    return differing


def _quiet_recipe(name: str) -> PrecisionConfig:
    """Return a recipe for a comparison, without the warnings of its function."""
    with warnings.catch_warnings(action="ignore", category=BridgeWarning):
        return REGISTRY.get(name)


def compute_alike(first: PrecisionConfig, second: PrecisionConfig) -> bool:
    """Return whether two configs have the same mode, low-precision format and scaling scheme."""
    if mode_of(first) != mode_of(second) or low_format_of(first) != low_format_of(second):
        return False
    return scheme_of(first) == scheme_of(second)


def _reading(config: PrecisionConfig, name: str) -> object:
    value = field_value(config, name)
    if value is None and name in DTYPES_OF_THE_MODE:
        return mode_of(config)
    return value
