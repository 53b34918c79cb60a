"""Where a composition looks for its configs, and the recipes that have to be loaded before it begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra._internal.config_repository import ConfigRepository
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from omegaconf import DictConfig, ListConfig, OmegaConf

from bridge.errors import RunConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hydra.core.override_parser.types import Override

__all__ = ["Search", "recipes_from"]


@dataclass(frozen=True, kw_only=True)
class Search:
    """Where configs are looked up, and which one is the primary."""

    main: str
    """Folder of the primary config, or ``pkg://module``."""
    extra: Path | None = None
    """Another folder, of a team's own groups."""
    config_name: str = "config"
    """The primary config, without ``.yaml``."""

    def path(self) -> ConfigSearchPath:
        """Return Hydra's search path."""
        found = create_config_search_path(self.main)
        if self.extra is not None:
            if not self.extra.is_dir():
                what = f"there is no such folder, got {str(self.extra)!r}"
                raise RunConfigError(f"--config-dir: {what}. Give an existing one.")
            schema = SearchPathQuery(provider="schema", path=None)
            found.prepend("command-line", f"file://{self.extra.resolve()}", anchor=schema)
        return found


def recipes_from(search: Search, overrides: Sequence[Override]) -> tuple[str, ...]:
    """Return what the key `recipes_from` names, on the command line or else in the primary config.

    Raises:
        RunConfigError: The key holds something else than a string or a list of strings.
    """
    named: Any = None
    primary = ConfigRepository(search.path()).load_config(search.config_name)
    if primary is not None and isinstance(primary.config, DictConfig):
        named = OmegaConf.select(primary.config, "recipes_from")
    for override in overrides:
        if override.key_or_group == "recipes_from":
            named = None if override.is_delete() else override.value()
    if named is None:
        return ()
    names = list(named) if isinstance(named, list | ListConfig) else [named]
    if not all(isinstance(name, str) for name in names):
        raise RunConfigError(
            f"recipes_from: must be a module or file, or a list of them, got {named!r}. "
            "Write recipes_from=acme.recipes or recipes_from=[acme.recipes,lab/recipes.py]."
        )
    return tuple(names)
