"""Composition: overrides and YAML files become one config, checked on the way, with who set what."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydra import version
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from bridge.front.container import check, container
from bridge.front.errors import COMPOSITION_ERRORS, told
from bridge.front.origin import COMMAND_LINE, Loader, Origins
from bridge.front.plain import refuse_targets
from bridge.front.problems import Problems
from bridge.front.run_folder import register_launch_time
from bridge.front.search import Search, recipes_from
from bridge.front.sections import KEYS
from bridge.front.source import GROUP, register

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hydra.core.config_loader import ConfigLoader
    from hydra.core.override_parser.types import Override

    from bridge.training.config import ConfigContainer

__all__ = ["VERSION_BASE", "Composition", "as_hydra_reads", "compose", "composed", "prepared"]

VERSION_BASE = "1.3"
"""The Hydra behaviour that configs are written for."""


@dataclass(frozen=True, kw_only=True)
class Composition:
    """A composed config and where it came from."""

    config: DictConfig
    """The run's config, without Hydra's node."""
    origins: Origins
    """Who set its keys."""
    choice: str | None
    """The chosen option of the group `mixed_precision`."""

    @classmethod
    def of(cls, config: DictConfig, hydra: DictConfig, loader: ConfigLoader) -> Composition:
        """Return a config that Hydra composed, with its origins."""
        choice = hydra.runtime.choices.get(GROUP)
        return cls(config=config, origins=Origins.trace(loader, hydra), choice=choice)

    def container(self) -> ConfigContainer:
        """Return the run it describes; see `bridge.front.container.container`."""
        return container(self.config, origins=self.origins, choice=self.choice)

    def check(self) -> None:
        """Check it without importing Megatron Core; see `bridge.front.container.check`."""
        check(self.config, origins=self.origins, choice=self.choice)


def compose(
    overrides: Sequence[str] = (),
    *,
    config_path: Path | str,
    config_name: str = "config",
    config_dir: Path | str | None = None,
) -> ConfigContainer:
    """Return the run that ``python scripts/train.py OVERRIDES`` describes.

    Args:
        overrides: As on the command line, ``mixed_precision=bf16_mixed`` say.
        config_path: Folder of the primary config.
        config_name: The primary config, without ``.yaml``.
        config_dir: Another folder, as with ``--config-dir``.

    Raises:
        RunConfigError: Keys, options or values that cannot be used.
        UnknownRecipeError: No such recipe.
        PrecisionConfigError: The precision can never be right.
        RecipeSourceError: What `recipes_from` names cannot be loaded.
    """
    extra = Path(config_dir) if config_dir is not None else None
    search = Search(main=str(Path(config_path).resolve()), extra=extra, config_name=config_name)
    with composed(search, overrides) as composition:
        return composition.container()


def prepared(search: Search, overrides: Sequence[str]) -> Loader:
    """Load the recipes that are asked for, refuse overrides of what does not exist, and return what composes.

    Raises:
        RunConfigError: Overrides that cannot be read, of unknown sections, or of groups with no option's name.
        RecipeSourceError: What `recipes_from` names cannot be loaded.
    """
    version.setbase(VERSION_BASE)
    setup_globals()
    register_launch_time()
    register()
    try:
        parsed = OverridesParser.create().parse_overrides(as_hydra_reads(overrides))
        register(recipes_from(search, parsed))
        loader = Loader(search.path())
        _refuse_unknown(parsed, loader)
    except COMPOSITION_ERRORS as error:
        raise told(error, overrides) from error
    return loader


@contextmanager
def composed(search: Search, overrides: Sequence[str], *, sweep: bool = False) -> Iterator[Composition]:
    """Compose, and keep ``${hydra:...}`` references resolvable inside the block.

    Args:
        search: Where to look.
        overrides: As on the command line.
        sweep: Overrides with several values are left out instead of refused.

    Raises:
        BridgeError: As `prepared`, and for options and keys that do not exist.
    """
    loader = prepared(search, overrides)
    mode = RunMode.MULTIRUN if sweep else RunMode.RUN
    try:
        whole = loader.load_configuration(search.config_name, as_hydra_reads(overrides), mode)
        _refuse_callbacks(whole)
        _settle_run_folder(whole, sweep=sweep)
    except COMPOSITION_ERRORS as error:
        raise told(error, overrides) from error
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(whole)
    try:
        yield Composition.of(_without_hydra(whole), whole.hydra, loader)
    finally:
        HydraConfig.instance().cfg = before


def as_hydra_reads(overrides: Sequence[str]) -> list[str]:
    """Return overrides with ``SECTION=null`` as ``~SECTION``: Hydra takes no null for a group."""
    nulls = {f"{key}=null": f"~{key}" for key in KEYS}
    return [nulls.get(word, word) for word in overrides]


def _refuse_unknown(overrides: Sequence[Override], loader: Loader) -> None:
    """Refuse overrides of sections and groups that do not exist, and options that are no names, all of them at once."""
    problems = Problems(Origins(dict.fromkeys((override.key_or_group for override in overrides), COMMAND_LINE)))
    for override in overrides:
        key = override.key_or_group
        section = key.partition(".")[0]
        value = (override.input_line or "").partition("=")[2] if override.is_sweep_override() else override.value()
        if loader.repository.group_exists(key):
            if isinstance(value, bool | int | float):
                problems.add(key, f"must be the name of an option, got {value!r}", value)
            continue
        if override.is_hydra_override() or section in KEYS:
            continue
        known = sorted({*KEYS, *loader.list_groups("")})
        problems.unknown(key, value, "no such section or group", known, word=section)
    problems.raise_any()


def _refuse_callbacks(whole: DictConfig) -> None:
    """Refuse what Hydra would instantiate from its own node besides its plugins."""
    problems = Problems(Origins())
    refuse_targets(OmegaConf.to_container(whole.hydra.callbacks), "hydra.callbacks", problems)
    problems.raise_any()


def _settle_run_folder(whole: DictConfig, *, sweep: bool) -> None:
    """Give what a job will know about itself a value, as its interpolations are resolved here."""
    hydra = whole.hydra
    with read_write(hydra), open_dict(hydra):
        hydra.runtime.output_dir = os.path.abspath(hydra.sweep.dir if sweep else hydra.run.dir)  # noqa: PTH100  as Hydra does
        if sweep:
            hydra.job.num, hydra.job.id = 0, "0"


def _without_hydra(whole: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(whole, [str(key) for key in whole if key != "hydra"])
