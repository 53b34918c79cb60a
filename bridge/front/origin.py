"""Who set each key of a composed config: a recipe, a YAML file or the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from bridge.errors import RunConfigError
from bridge.front.source import SCHEME, recipe_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hydra._internal.config_repository import IConfigRepository
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.default_element import ResultDefault
    from hydra.plugins.config_source import ConfigSource

__all__ = ["COMMAND_LINE", "Loader", "Origins"]

COMMAND_LINE = "command line"


class Loader(ConfigLoaderImpl):
    """Hydra's loader, which remembers the defaults list of what it composed last."""

    defaults: list[ResultDefault] | None = None

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        self.defaults = list(defaults)
        return super()._compose_config_from_defaults_list(defaults, repo)


class Origins:
    """Dotted key -> who set it."""

    def __init__(self, by_key: Mapping[str, str] | None = None, layers: Sequence[str] = ()) -> None:
        self._by_key = dict(by_key or {})
        self._layers = tuple(layers)

    def of(self, key: str) -> str:
        """Return who set `key`, or what is around it or in it; "configuration" where nobody is known."""
        around = key
        while around:
            if around in self._by_key:
                return self._by_key[around]
            around = around.rpartition(".")[0]
        return next((self._by_key[known] for known in self._by_key if known.startswith(f"{key}.")), "configuration")

    def layer(self, origin: str) -> int:
        """Return the place of `origin` in the order of composition; a later one overrides an earlier one."""
        return self._layers.index(origin) if origin in self._layers else len(self._layers)

    @classmethod
    def trace(cls, loader: ConfigLoader, hydra: DictConfig) -> Origins:
        """Retrace the composition that made a config.

        Args:
            loader: What composed it.
            hydra: Its `hydra` node.

        Raises:
            RunConfigError: A YAML file has the name of a registered recipe, so that one of the two would be ignored.
        """
        words: Any = OmegaConf.to_container(hydra.overrides, resolve=False)  # a word may hold a ${reference}
        overrides = [*words["hydra"], *words["task"]]
        defaults = loader.defaults if isinstance(loader, Loader) else None
        if defaults is None:  # somebody else composed it: Hydra's own main, say
            defaults = loader.compute_defaults_list(hydra.job.config_name, overrides, RunMode.RUN).defaults
        sources = [
            SourcesRegistry.instance().resolve(source.schema)(source.provider, f"{source.schema}://{source.path}")
            for source in hydra.runtime.config_sources
        ]
        by_key: dict[str, str] = {}
        layers: list[str] = []
        for default in defaults:
            set_here = _keys_of(default, sources)
            layers += set(set_here.values())
            by_key.update(set_here)
        groups = set(hydra.runtime.choices)
        for override in OverridesParser.create().parse_overrides(words["task"]):
            if override.key_or_group in groups or override.is_sweep_override():
                continue
            if override.is_delete():
                by_key.pop(override.key_or_group, None)
            else:
                by_key.update(dict.fromkeys(_leaves(override.value(), override.key_or_group), COMMAND_LINE))
        return cls(by_key, layers)


def _keys_of(default: ResultDefault, sources: Sequence[ConfigSource]) -> dict[str, str]:
    path = default.config_path or ""
    holders = [source for source in sources if source.is_config(path)]
    if not holders or path.startswith("hydra/") or holders[0].scheme() == "structured":
        return {}
    recipe = recipe_name(path)
    others = [source for source in holders if source.scheme() != SCHEME]
    if recipe and others:
        raise RunConfigError(
            f"{path}: is both a registered recipe and a YAML file, got {others[0].full_path()}/{path}.yaml. "
            "Rename the file; its defaults list can name the recipe to build on."
        )
    values = OmegaConf.to_container(holders[0].load_config(path).config, resolve=False)
    if isinstance(values, dict):
        values.pop("defaults", None)
    origin = f"recipe {recipe}" if recipe else f"{path}.yaml"
    return dict.fromkeys(_leaves(values, default.package or ""), origin)


def _leaves(value: Any, prefix: str) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix
