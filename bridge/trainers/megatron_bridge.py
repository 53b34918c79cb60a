"""Megatron Bridge: registered recipes by name in its `ConfigContainer` and its command line."""

from typing import Any

from bridge.registry.registry import REGISTRY


def register_with_megatron_bridge(*, replace: bool = False) -> list[str]:
    """Add every registered recipe to Megatron Bridge's table of recipes.

    The table gets both spellings of a name, with underscores and with dashes. A recipe makes a
    config of our class. Its `setup` writes the stated fields alone, checks the result on copies and
    logs the values that it overrides. A saved run names Megatron Bridge's class.

    Args:
        replace: Replace Megatron Bridge's recipes of the same name too.

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


def _make_recipe_function(name: str) -> Any:
    """Return a function without arguments that makes a recipe, named and documented like it."""

    def make() -> Any:
        return REGISTRY.get(name)

    make.__name__ = name
    make.__doc__ = REGISTRY.recipe(name).summary
    return make
