"""`to_config`: the node `mixed_precision` of a composed config, as a `MixedPrecisionConfig`."""

import sys
from collections.abc import Mapping
from typing import Any

from bridge.errors import PrecisionTypeError
from bridge.precision.statements import copy_with_only
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import (
    GROUP,
    REGISTRY,
    get_mixed_precision_config,
    get_recipe_flag,
)

CONFIGURATION_SOURCE = "configuration"
"""The source of fields that come from no recipe."""


def to_config(node: object) -> MixedPrecisionConfig:
    """Return the precision that a node of a composed config describes.

    If the fields come from a recipe of Hydra's group `mixed_precision`, the recipe stays their
    source, so that reports name it. Every other field has the source "configuration".

    Args:
        node: ``cfg.mixed_precision`` of Hydra or OmegaConf, a mapping of fields, a recipe's name, or
            a config. Every key of a mapping counts as stated.

    Raises:
        PrecisionTypeError: The node is not such an object, or a value has a wrong type, is missing or
            cannot be resolved.
        UnknownFieldError: A key is not a field.
        UnknownRecipeError: There is no such recipe.
        PrecisionConfigError: The precision is wrong in any run.
    """
    if isinstance(node, str) or not isinstance(node, Mapping):
        config = get_mixed_precision_config(node)  # type: ignore[arg-type]  # it refuses other types
    else:
        config = _make_config(_resolve_node(node), _find_recipe(node))
    config.finalize()
    return config


def _find_recipe(node: Any) -> MixedPrecisionConfig | None:
    """Return the recipe of Hydra's group that a node comes from, or None unless there is exactly one."""
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
    """Return the config with these fields.

    A field that the recipe states with the same value keeps the recipe as its source.
    """
    if not values:
        remedy = (
            "Choose a recipe by its name; `auto` is resolved by `precision-bridge train` alone."
        )
        raise PrecisionTypeError.of(GROUP, "states no field of a precision", values, remedy)
    checked = MixedPrecisionConfig.from_dict(values, source=CONFIGURATION_SOURCE)
    if recipe is None:
        return checked
    stated, stated_by_recipe = checked.to_dict(), recipe.to_dict().items()
    stated_over = {
        name: value for name, value in stated.items() if (name, value) not in stated_by_recipe
    }
    return copy_with_only(recipe, stated).override(CONFIGURATION_SOURCE, **stated_over)


def _resolve_node(node: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a mapping as plain data. References in a config of OmegaConf are resolved."""
    # If OmegaConf is not imported, the node cannot be an object of it.
    omegaconf: Any = sys.modules.get("omegaconf")
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
