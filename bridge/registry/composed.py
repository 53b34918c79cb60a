"""`to_config`: the node `mixed_precision` of a composed config, as a `MixedPrecisionConfig`."""

import sys
from collections.abc import Mapping
from typing import Any

from bridge.errors import PrecisionTypeError
from bridge.precision.statements import copy_with_only
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import GROUP, REGISTRY, get_mixed_precision_config, get_recipe_flag

CONFIGURATION_SOURCE = "configuration"
"""Source of the fields that no recipe gave."""


def to_config(node: object) -> MixedPrecisionConfig:
    """Return the precision that a node of a composed config describes.

    The fields of a recipe that Hydra's group `mixed_precision` gave keep the recipe as their source, so that reports
    name it; every other field has the source "configuration".

    Args:
        node: ``cfg.mixed_precision`` of Hydra or OmegaConf, a mapping of fields, a recipe's name, or a config. Every
            key of a mapping counts as stated.

    Raises:
        PrecisionTypeError: No such thing, a value of the wrong type, or a value that is missing or cannot be resolved.
        UnknownFieldError: A key that is no field.
        UnknownRecipeError: No such recipe.
        PrecisionConfigError: The precision can never be right.
    """
    if isinstance(node, str) or not isinstance(node, Mapping):
        config = get_mixed_precision_config(node)  # type: ignore[arg-type]  # refuses what is no precision
    else:
        config = _make_config(_resolve_node(node), _find_recipe(node))
    config.finalize()
    return config


def _find_recipe(node: Any) -> MixedPrecisionConfig | None:
    """Return the recipe that Hydra's group gave a node; None for a node of several recipes or of none."""
    if not hasattr(node, "_get_flag"):
        return None
    names: list[str] = []
    for name in REGISTRY.names():
        if node._get_flag(get_recipe_flag(name)):
            names.append(name)
    if len(names) != 1:
        return None
    return REGISTRY.get(names[0])


def _make_config(
    values: dict[str, Any], recipe: MixedPrecisionConfig | None
) -> MixedPrecisionConfig:
    """Return the config with these fields; those that the recipe states alike keep it as their source."""
    if not values:
        remedy = (
            "Choose a recipe by its name; `auto` is resolved by `precision-bridge train` alone."
        )
        raise PrecisionTypeError.of(GROUP, "states no field of a precision", values, remedy)
    checked = MixedPrecisionConfig.from_dict(values, source=CONFIGURATION_SOURCE)
    if recipe is None:
        return checked
    of_recipe, stated = recipe.to_dict(), checked.to_dict()
    given_by_recipe = of_recipe.items()
    stated_over = {
        name: value for name, value in stated.items() if (name, value) not in given_by_recipe
    }
    return copy_with_only(recipe, stated).override(CONFIGURATION_SOURCE, **stated_over)


def _resolve_node(node: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a mapping as plain data, with the references of a config of OmegaConf resolved."""
    omegaconf: Any = sys.modules.get("omegaconf")  # a node of it exists only where it is imported
    if omegaconf is None or not omegaconf.OmegaConf.is_config(node):
        return {str(key): value for key, value in node.items()}
    try:
        plain = omegaconf.OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    except omegaconf.errors.OmegaConfBaseException as error:
        why = str(error.msg or error).partition("\n")[0].rstrip(".")
        raise PrecisionTypeError(
            f"{error.full_key or GROUP}: cannot be resolved: {why}. Correct the value."
        ) from error
    return {str(key): value for key, value in plain.items()}
