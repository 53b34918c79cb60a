"""`to_config`: the node `mixed_precision` of a composed config, as a `MixedPrecisionConfig`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from bridge.errors import PrecisionTypeError
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY, get_mixed_precision_config, is_auto

__all__ = ["to_config"]

GROUP = "mixed_precision"
CONFIGURATION = "configuration"


def to_config(node: object) -> MixedPrecisionConfig:
    """Return the precision that a node of a composed config describes.

    Inside a Hydra application the fields of the chosen recipe keep the recipe as their source, so that reports name it;
    every other field has the source "configuration".

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
        config = _of_fields(_plain(node), _choice())
    config.finalize()
    return config


def _of_fields(values: dict[str, Any], choice: str | None) -> MixedPrecisionConfig:
    """Return the config of plain fields; `choice` is the option of the group, where it is known."""
    if not values:
        rule = "needs a choice for a GPU" if is_auto(choice) else "states no field of a precision"
        remedy = "Choose a recipe: `precision-bridge recipes` lists them."
        raise PrecisionTypeError.of(GROUP, rule, choice or {}, remedy)
    recipe = REGISTRY.get(choice) if choice is not None and choice in REGISTRY else None
    own = recipe.to_dict() if recipe is not None else {}
    if recipe is None or not own.keys() <= values.keys():
        return MixedPrecisionConfig.from_dict(values, source=CONFIGURATION)
    checked = type(recipe).from_dict(values).to_dict()
    config = type(recipe)().state(**{name: value for name, value in own.items() if checked.get(name) == value})
    config.made_by(str(recipe.recipe))
    return config.state(CONFIGURATION, **{name: value for name, value in checked.items() if own.get(name) != value})


def _plain(node: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a mapping as plain data, with the references of a config of OmegaConf resolved."""
    omegaconf: Any = sys.modules.get("omegaconf")  # a node of it exists only where it is imported
    if omegaconf is None or not omegaconf.OmegaConf.is_config(node):
        return {str(key): value for key, value in node.items()}
    try:
        plain = omegaconf.OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    except omegaconf.errors.OmegaConfBaseException as error:
        why = str(error.msg or error).partition("\n")[0].rstrip(".")
        text = f"{error.full_key or GROUP}: cannot be resolved: {why}. Correct the value."
        raise PrecisionTypeError(text) from error
    return {str(key): value for key, value in plain.items()}


def _choice() -> str | None:
    """Return the chosen option of the group in a running Hydra application, None where that is not known."""
    module: Any = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return None
    choices = dict(module.HydraConfig.get().runtime.choices)
    of_group = [option for group, option in choices.items() if str(group).partition("@")[0] == GROUP]
    return str(of_group[0]) if len(of_group) == 1 else None
