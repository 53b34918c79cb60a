"""`build_stated_precision`: the recipe of a run, with the fields that other layers state over it."""

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
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY


def apply_over_recipe(run_input: RunInput, name: str) -> RunInput:
    """Return the sections of a run with the fields of a recipe. Stated fields override them.

    Raises:
        UnknownRecipeError: The registry has no such recipe.
    """
    recipe = REGISTRY.get(name)
    stated = recipe.to_dict()
    origin = f"recipe {get_recipe_name(recipe)}"
    layer = ConfigLayer(
        origin=origin, values=flatten_leaves({PRECISION_KEY: stated}, ""), is_recipe=True
    )
    fields = {**stated, **(run_input.sections.get(PRECISION_KEY) or {})}
    sections = {**run_input.sections, PRECISION_KEY: fields}
    origins = run_input.origins.over(layer, instead_of=PRECISION_KEY)
    return replace(run_input, choice=name, recipe=recipe, sections=sections, origins=origins)


def build_stated_precision(run_input: RunInput, problems: Problems) -> MixedPrecisionConfig | None:
    """Return the recipe of a run with the fields that other layers state over it.

    Args:
        run_input: The sections of the run, its recipe and the origin of each value.
        problems: It gets the fields that do not exist, and the values of a wrong type.

    Returns:
        The config, or None if no recipe is chosen and no field is stated.
    """
    fields = run_input.sections.get(PRECISION_KEY)
    if not fields and run_input.choice is None:
        return None
    if not isinstance(fields, dict):
        problems.add(PRECISION_KEY, "must be a recipe's name or a mapping of fields", fields)
        return None
    if run_input.recipe is not None:
        config = copy_with_only(run_input.recipe, fields)
    else:
        config = MixedPrecisionConfig()
    layers = _collect_layers(config, fields, problems)
    recipe_origins: list[str] = []
    other_origins: list[str] = []
    for origin in dict.fromkeys((*run_input.origins.order, *layers)):
        if origin not in layers:
            continue
        if origin in run_input.origins.recipe_origins:
            recipe_origins.append(origin)
        else:
            other_origins.append(origin)
    # `mark_recipe` attributes every statement so far to the recipe. So the layers of a recipe in
    # YAML are written before it, and the layers that change the recipe after it.
    for origin in recipe_origins:
        config.override(origin, **layers[origin])
    if run_input.choice is not None and run_input.recipe is None:
        mark_recipe(config, run_input.choice)
    for origin in other_origins:
        config.override(origin, **layers[origin])
    recipe = fields.get(RECIPE_NAME_KEY)
    if recipe is not None:
        _mark_saved_recipe(config, recipe)
    return config


def _mark_saved_recipe(config: MixedPrecisionConfig, recipe: str) -> None:
    """Mark the recipe that a saved config names, and the fields that differ from that recipe."""
    stated = get_stated_values(config)
    recipe_values = stated
    if recipe in REGISTRY:
        recipe_values = REGISTRY.get(recipe).to_dict()
    differing = [name for name, value in stated.items() if recipe_values.get(name) != value]
    mark_recipe(config, recipe, over=differing)


def _collect_layers(
    config: MixedPrecisionConfig, fields: Mapping[str, Any], problems: Problems
) -> dict[str, dict[str, Any]]:
    """Return origin -> the fields that it set, without the fields that the recipe itself states.

    Fields that do not exist and values of a wrong type are added to `problems`.
    """
    stated = config.to_dict()
    origins = problems.origins
    layers: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        path = f"{PRECISION_KEY}.{name}"
        origin = origins.get_origin(path)
        is_of_recipe = name in stated and stated[name] == value and origin in origins.recipe_origins
        if name == RECIPE_NAME_KEY or is_of_recipe:
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
