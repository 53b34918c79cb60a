"""The registry as a group of Hydra: registered recipes are options of `mixed_precision`.

No recipe needs a file. For an option such as ``mixed_precision/bf16_mixed`` Hydra calls its config
sources in the order of its search path. `RecipeSource` looks the option up in the registry, under
every spelling of the name. An application has the group after a call of `register_group`. Its own
files and nodes of the group come before the recipes. The processes of a sweep find `RecipeSource`
by Hydra's scan for plugins, and get the search path from the main process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig

from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import (
    GROUP,
    REGISTRY,
    Recipe,
    get_recipe_flag,
    is_auto,
    load_recipes_from,
)

URL_SCHEME = "recipes"
"""The URL scheme of the entry on Hydra's search path: ``recipes://``."""


def register_group(*recipes_from: str) -> None:
    """Make the registered recipes options of Hydra's group `mixed_precision`.

    Args:
        recipes_from: Modules or ``.py`` files that register further recipes.
    """
    load_recipes_from(recipes_from)
    names: list[str] = []
    for name in recipes_from:
        if name.endswith(".py"):
            names.append(str(Path(name).expanduser().resolve()))
        else:
            names.append(name)
    RecipeSearchPath.recipes_from = tuple(names)
    Plugins.instance().register(RecipeSource)
    Plugins.instance().register(RecipeSearchPath)


@contextmanager
def restore_environment() -> Iterator[None]:
    """Restore the environment variables at the end of a ``with`` block, for the next job of a sweep."""
    before = dict(os.environ)
    try:
        yield
    finally:
        # `clear` would hide all variables from the thread that compiles the kernels.
        for key in os.environ.keys() - before.keys():
            del os.environ[key]
        os.environ.update(before)


def _find_changed_variables(before: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that were added or changed since `before`."""
    return {key: value for key, value in os.environ.items() if before.get(key) != value}


def _parse_option(config_path: str) -> str:
    """Return the option of `mixed_precision` that a config path names, or "" for another path."""
    group, _, option = config_path.rpartition("/")
    if group != GROUP:
        return ""
    return option.removesuffix(".yaml")


def find_recipe_name(config_path: str) -> str | None:
    """Return the canonical name of the recipe that a config path names, or None for another path."""
    name = _parse_option(config_path)
    # The first test keeps other paths from loading the registry.
    if not name or name not in REGISTRY:
        return None
    return REGISTRY.recipe(name).name


@dataclass(frozen=True, kw_only=True)
class _CachedRecipe:
    """A recipe with the config that its function made."""

    recipe: Recipe
    config: MixedPrecisionConfig
    variables: Mapping[str, str]
    """The environment variables that the recipe's function set."""


class RecipeSource(ConfigSource):
    """The config source of the search-path entry ``recipes://``.

    Modules and files after the scheme, separated like PATH, are loaded first. They are part of the
    entry because the processes of a sweep get only the entry, and compose their configs themselves.
    """

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        load_recipes_from(filter(None, self.path.split(os.pathsep)))
        self._cached: dict[str, _CachedRecipe] = {}
        """Canonical name -> the recipe with the config that was made last."""

    def __reduce__(self) -> tuple[type[RecipeSource], tuple[str, str]]:
        return RecipeSource, (self.provider, self.full_path())

    def __deepcopy__(self, memo: dict[int, Any]) -> RecipeSource:
        return self  # Hydra composes with a copy of its sources

    @staticmethod
    def scheme() -> str:
        """Return the scheme of the entry, the text before ``://``."""
        return URL_SCHEME

    def available(self) -> bool:
        """Return True, because there is always a registry."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return whether the path is the group, or the root that contains it."""
        return config_path.strip("/") in ("", GROUP)

    def is_config(self, config_path: str) -> bool:
        """Return whether the path names a registered recipe, or ``auto``.

        Hydra's ConfigStore comes after this source on the search path. So a node of the application
        in the store is left to the store.
        """
        option = _parse_option(config_path)
        if not option:
            return False
        stored = ConfigStore.instance().get_type(f"{GROUP}/{option}.yaml")
        if stored == ObjectType.CONFIG:
            return False
        return is_auto(option) or option in REGISTRY

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the fields that the recipe states, as plain data.

        ``auto`` has no fields, because the recipe is chosen later. The node is not a struct, so that
        fields that the recipe does not state can be overridden too.
        """
        name = find_recipe_name(config_path)
        if name is None and not is_auto(_parse_option(config_path)):
            raise ConfigLoadError(f"Config not found: {config_path}")
        if name is None:
            node = DictConfig({}, flags={"struct": False})
        else:
            stated = self._get_or_make(name).config.to_dict()
            node = DictConfig(stated, flags={"struct": False, get_recipe_flag(name): True})
        return ConfigResult(
            config=node, path=self.full_path(), provider=self.provider, header={"package": None}
        )

    def recipe(self, name: str) -> MixedPrecisionConfig:
        """Return the config of a recipe, and set the environment variables that its function sets."""
        cached_recipe = self._get_or_make(name)
        os.environ.update(cached_recipe.variables)
        return cached_recipe.config

    def _get_or_make(self, name: str) -> _CachedRecipe:
        """Return a recipe with its config, which is made again only if the recipe was replaced.

        The environment variables are recorded and not set. A sweep composes all of its jobs before
        the first job runs.
        """
        recipe = REGISTRY.recipe(name)
        if name in self._cached and self._cached[name].recipe is recipe:
            return self._cached[name]
        with restore_environment():
            before = dict(os.environ)
            self._cached[name] = _CachedRecipe(
                recipe=recipe, config=REGISTRY.get(name), variables=_find_changed_variables(before)
            )
        return self._cached[name]

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the canonical names of the recipes.

        At the root the result is the group, if a recipe was chosen before.
        """
        if config_path.strip("/") == GROUP:
            if results_filter == ObjectType.GROUP:
                return []
            return sorted(REGISTRY.names())
        if not config_path and results_filter != ObjectType.CONFIG and self._cached:
            return [GROUP]
        return []


class RecipeSearchPath(SearchPathPlugin):
    """Adds the registry to Hydra's search path, after the folder of the primary config.

    `register_group` registers this plugin. Without that call an application can have a plain key
    `mixed_precision`, and ``mixed_precision=fp16`` sets its value.
    """

    recipes_from: ClassVar[tuple[str, ...]] = ()
    """Modules and files of recipes to load first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the entry."""
        search_path.append(URL_SCHEME, f"{URL_SCHEME}://{os.pathsep.join(self.recipes_from)}")
