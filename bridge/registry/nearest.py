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
    return f"{name}, but {fields_in_words(config, found)}" if found else name


def label_of_owners(model: Mapping[str, Any]) -> str:
    """Return the label of a run without a recipe: mode and scheme as the model's config holds them."""
    mode = [*(name for name in ("bf16", "fp16") if model[name]), "fp32"][0]
    low = [name for name in ("fp8", "fp4") if model[name]]
    scheme = f" with {low[0]} {model[f'{low[0]}_recipe']}" if low else ""
    return f"{mode}{scheme}, without a recipe"


def nearest_recipe(config: PrecisionConfig) -> str | None:
    """Return the recipe of the same mode, format and scheme with the fewest other differences; None: there is none."""
    made = {recipe.name: _made(recipe.name) for recipe in REGISTRY.recipes()}
    alike = [name for name, one in made.items() if compute_alike(one, config)]
    return min(alike, key=lambda name: len(differing_fields(config, made[name])), default=None)


def differing_fields(config: PrecisionConfig, recipe: PrecisionConfig) -> list[str]:
    """Return the fields that act in one of two runs and read otherwise there, in order of declaration."""
    ignored = {
        *MODE_SWITCHES,
        *SECOND_NAMES,
        *(inert_fields(config).keys() & inert_fields(recipe).keys()),
    }
    names = [name for name in field_names(config) if name not in ignored]
    return [name for name in names if _reading(config, name) != _reading(recipe, name)]


def _made(name: str) -> PrecisionConfig:
    """Return a recipe that nobody asked for: what it warns of is of no interest."""
    with warnings.catch_warnings(action="ignore", category=BridgeWarning):
        return REGISTRY.get(name)


def compute_alike(one: PrecisionConfig, other: PrecisionConfig) -> bool:
    """Return whether two configs have the same mode, low-precision format and scaling scheme."""
    return all(read(one) == read(other) for read in (mode_of, low_format_of, scheme_of))


def _reading(config: PrecisionConfig, name: str) -> object:
    value = field_value(config, name)
    return mode_of(config) if value is None and name in OF_THE_MODE else value
