"""Megatron Bridge: registered recipes by name in its `ConfigContainer` and its command line."""

from typing import Any

from bridge.registry.registry import REGISTRY


def register_with_megatron_bridge(*, replace: bool = False) -> list[str]:
    """Add every registered recipe to Megatron Bridge's own table of recipes.

    It stands there under both spellings of its name. A recipe makes a config of our class there.
    Its `setup` writes the stated fields only, checks the result on copies and logs what it
    overrides; a saved run names Megatron Bridge's class.

    Args:
        replace: Also take the place of Megatron Bridge's recipes of the same name.

    Returns:
        The names that were added, without the spellings.

    Raises:
        ImportError: Megatron Bridge is not installed.
    """
    from megatron.bridge.training import mixed_precision as peer

    table: dict[str, Any] = peer.MIXED_PRECISION_RECIPES
    added = [name for name in REGISTRY.names() if replace or name not in table]
    for name in added:
        for spelling in (name, name.replace("_", "-")):
            table[spelling] = _maker(name)
    return added


def _maker(name: str) -> Any:
    def make() -> Any:
        return REGISTRY.get(name)

    make.__name__ = name
    make.__doc__ = REGISTRY.recipe(name).summary
    return make
