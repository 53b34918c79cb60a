"""`build_stated_precision`: the precision of a run, its recipe with the fields that other layers state over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bridge.errors import PrecisionTypeError
from bridge.precision.statements import (
    check_value,
    copy_with_only,
    get_recipe_name,
    get_stated_values,
    list_field_names,
    mark_recipe,
)
from bridge.preflight.origins import ConfigLayer, flatten_leaves
from bridge.preflight.problems import Problems
from bridge.read.run_input import RunInput
from bridge.read.run_keys import PRECISION_KEY, RECIPE_NAME_KEY
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY


def apply_over_recipe(source: RunInput, name: str) -> RunInput:
    """Return the run with a recipe of the registry below the fields that the run states."""
    recipe = REGISTRY.get(name)
    stated = recipe.to_dict()
    origin = f"recipe {get_recipe_name(recipe)}"
    layer = ConfigLayer(
        origin=origin, values=flatten_leaves({PRECISION_KEY: stated}, ""), is_recipe=True
    )
    fields = {**stated, **(source.sections.get(PRECISION_KEY) or {})}
    sections = {**source.sections, PRECISION_KEY: fields}
    origins = source.origins.over(layer, instead_of=PRECISION_KEY)
    return replace(source, choice=name, recipe=recipe, sections=sections, origins=origins)


def build_stated_precision(source: RunInput, problems: Problems) -> MixedPrecisionConfig | None:
    """Return the recipe of a run with the fields that other layers state over it.

    It is None where no recipe is chosen and no field is stated. Fields that do not exist and values
    that do not fit become `problems`.
    """
    fields = source.sections.get(PRECISION_KEY)
    if not fields and source.choice is None:
        return None
    if not isinstance(fields, dict):
        problems.add(PRECISION_KEY, "must be a recipe's name or a mapping of fields", fields)
        return None
    if source.recipe is not None:
        config = copy_with_only(source.recipe, fields)
    else:
        config = MixedPrecisionConfig()
    layers = _collect_layers(config, fields, problems)
    of_recipe: list[str] = []
    over_it: list[str] = []
    for origin in dict.fromkeys((*source.origins.order, *layers)):
        if origin not in layers:
            continue
        if origin in source.origins.recipe_origins:
            of_recipe.append(origin)
        else:
            over_it.append(origin)
    # `mark_recipe` takes every statement so far as the recipe's. So the layers of a recipe in YAML
    # come before it, and those that change the recipe after it.
    for origin in of_recipe:
        config.override(origin, **layers[origin])
    if source.choice is not None and source.recipe is None:
        mark_recipe(config, source.choice)
    for origin in over_it:
        config.override(origin, **layers[origin])
    recipe = fields.get(RECIPE_NAME_KEY)
    if recipe is not None:
        _mark_saved_recipe(config, recipe)
    return config


def _mark_saved_recipe(config: MixedPrecisionConfig, recipe: str) -> None:
    """Mark the recipe that a saved config names, and the fields that differ from that recipe."""
    stated = get_stated_values(config)
    of_recipe = stated
    if recipe in REGISTRY:
        of_recipe = REGISTRY.get(recipe).to_dict()
    over = [name for name, value in stated.items() if of_recipe.get(name) != value]
    mark_recipe(config, recipe, over=over)


def _collect_layers(
    config: MixedPrecisionConfig, fields: Mapping[str, Any], problems: Problems
) -> dict[str, dict[str, Any]]:
    """Return origin -> the fields that it set, without those that the recipe itself states."""
    stated = config.to_dict()
    origins = problems.origins
    layers: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        path = f"{PRECISION_KEY}.{name}"
        origin = origins.get_origin(path)
        is_recipes = name in stated and stated[name] == value and origin in origins.recipe_origins
        if name == RECIPE_NAME_KEY or is_recipes:
            continue
        if name not in list_field_names(config):
            problems.unknown(path, value, "no such field", list_field_names(config))
            continue
        try:
            layers.setdefault(origin, {})[name] = check_value(config, name, value)
        except PrecisionTypeError as error:
            for fault in error.faults:
                problems.add(path, fault.rule, fault.value, fault.remedy)
    return layers
