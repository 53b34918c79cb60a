"""Registered recipes by name in Megatron Bridge's `ConfigContainer` and on its command line."""

from collections.abc import Callable
from typing import Any

from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY


def register_with_megatron_bridge(*, replace: bool = False) -> list[str]:
    """Add every registered recipe to Megatron Bridge's table of recipes.

    The table gets both spellings of a name, with underscores and with dashes. A registered recipe
    makes a config of this project's class. Its `setup` writes only the stated fields, checks the
    result on copies, and logs the values that it overrides. The files of a saved run name Megatron
    Bridge's class.

    Args:
        replace: Whether Megatron Bridge's recipes of the same name are replaced.

    Returns:
        The names that were added, in the spelling with underscores.

    Raises:
        ImportError: Megatron Bridge is not installed.
    """
    from megatron.bridge.training import mixed_precision as peer

    table: dict[str, Any] = peer.MIXED_PRECISION_RECIPES
    added = [name for name in REGISTRY.names() if replace or name not in table]
    for name in added:
        for spelling in (name, name.replace("_", "-")):
            table[spelling] = _make_recipe_function(name)
    return added


def _make_recipe_function(name: str) -> Callable[[], MixedPrecisionConfig]:
    """Return a function that makes a recipe. It has the name and summary of the recipe."""

    def make_recipe() -> MixedPrecisionConfig:
        return REGISTRY.get(name)

    make_recipe.__name__ = name
    make_recipe.__doc__ = REGISTRY.recipe(name).summary
    return make_recipe
