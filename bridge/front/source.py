"""Registered recipes as options of the Hydra group `mixed_precision`, without a file per recipe.

Hydra asks its config sources, in the order of its search path, whether they have ``mixed_precision/bf16_mixed``. This
source asks the registry, so that a recipe is an option from the moment it is registered, under each of its spellings.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from bridge.front.sections import store_sections
from bridge.precision.auto import is_auto
from bridge.registry.registry import REGISTRY
from bridge.registry.sources import load_recipes_from

if TYPE_CHECKING:
    from hydra.core.config_search_path import ConfigSearchPath

    from bridge.registry.config import MixedPrecisionConfig

__all__ = ["GROUP", "SCHEME", "RecipeSource", "recipe_name", "register"]

GROUP = "mixed_precision"
SCHEME = "recipes"


def register(recipes_from: tuple[str, ...] = ()) -> None:
    """Make the registry a config source of every composition from now on.

    Args:
        recipes_from: Modules and files of recipes to load first.

    Raises:
        RecipeSourceError: One of them cannot be loaded.
    """
    load_recipes_from(recipes_from)
    RecipeSearchPath.recipes_from = tuple(
        str(Path(name).expanduser().resolve()) if name.endswith(".py") else name for name in recipes_from
    )
    Plugins.instance().register(RecipeSource)
    Plugins.instance().register(RecipeSearchPath)
    store_sections()


def recipe_name(config_path: str) -> str | None:
    """Return the canonical name of the registered recipe that a config path stands for, or None."""
    name = _option(config_path)
    return REGISTRY.recipe(name).name if name in REGISTRY else None


def _option(config_path: str) -> str:
    """Return the option of the group `mixed_precision` that a config path stands for, "" for another path."""
    group, _, option = config_path.rpartition("/")
    return option.removesuffix(".yaml") if group == GROUP else ""


class RecipeSource(ConfigSource):
    """Search-path entry ``recipes://``; what follows, separated like PATH, is loaded first.

    The names are part of the entry so that they reach the processes of a sweep, which compose their configs themselves.
    """

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        load_recipes_from(filter(None, self.path.split(os.pathsep)))
        self.made: dict[str, MixedPrecisionConfig] = {}
        """Canonical name -> the config that the registry made for this composition."""

    def __reduce__(self) -> tuple[type[RecipeSource], tuple[str, str]]:
        return RecipeSource, (self.provider, self.full_path())

    @staticmethod
    def scheme() -> str:
        """Return what stands before ``://``."""
        return SCHEME

    def available(self) -> bool:
        """Return True: there is always a registry."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return whether the path is the group, or what holds it."""
        return config_path.strip("/") in ("", GROUP)

    def is_config(self, config_path: str) -> bool:
        """Return whether the path names a registered recipe, in any of its spellings, or asks for a choice."""
        return recipe_name(config_path) is not None or is_auto(_option(config_path))

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the fields that the recipe states, as plain data; none for a choice, which is made later."""
        name = recipe_name(config_path)
        if name is None and not is_auto(_option(config_path)):
            raise ConfigLoadError(f"Config not found: {config_path}")
        if name is not None and name not in self.made:
            self.made[name] = REGISTRY.get(name)
        node = OmegaConf.create(self.made[name].to_dict() if name is not None else {})
        return ConfigResult(config=node, path=self.full_path(), provider=self.provider, header={"package": None})

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the canonical names of the recipes; the group itself at the root."""
        if config_path.strip("/") == GROUP:
            return [] if results_filter == ObjectType.GROUP else sorted(REGISTRY.names())
        return [] if config_path or results_filter == ObjectType.CONFIG else [GROUP]


class RecipeSearchPath(SearchPathPlugin):
    """Puts the registry on Hydra's search path, behind the primary config's folder."""

    recipes_from: ClassVar[tuple[str, ...]] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the entry."""
        search_path.append(SCHEME, f"{SCHEME}://{os.pathsep.join(self.recipes_from)}")
