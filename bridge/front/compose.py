"""Composition: Hydra makes one config of YAML files, recipes and overrides, and notes which of them set which key.

Registered recipes are options of the Hydra group `mixed_precision` (`bridge.registry.hydra_group`).
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobRuntime, setup_globals
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.base import Container
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from bridge.errors import BridgeError, RunConfigError
from bridge.front.errors import COMPOSITION_ERRORS, translated
from bridge.front.problems import (
    KEYS,
    OWNERS,
    PRECISION,
    RECIPES,
    RUN_KEYS,
    SECTIONS,
    GivenRun,
    Layer,
    Origins,
    Problems,
    leaves,
    recipe_sources,
    trusted_sources,
)
from bridge.precision.fields import COMMAND_LINE
from bridge.precision.strict_yaml import require_bounded
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.hydra_group import SCHEME, RecipeSource, recipe_name, register_group

VERSION_BASE = "1.3"
"""The Hydra behaviour that configs are written for."""
JOB = "train"
"""The job's name where no script is run: `${hydra:job.name}`."""
CRASH = "Run folder: "
"""Begins the note on a job's own error."""
MAX_REFERENCES = 2_000
"""A run's config resolves fewer than a hundred."""
MAX_CHARACTERS = 2**20
"""Of one value."""


@contextmanager
def in_our_words(overrides: Sequence[str], repository: IConfigRepository | None = None) -> Iterator[None]:
    """Translate the errors of a block; a crash of the job, whose folder is noted on it, stays as it is."""
    try:
        yield
    except COMPOSITION_ERRORS as error:
        if isinstance(error, BridgeError) or any(note.startswith(CRASH) for note in getattr(error, "__notes__", ())):
            raise
        raise translated(error, overrides, repository) from error


@contextmanager
def own_environment() -> Iterator[None]:
    """Undo on leaving what the block does to the environment: the next job of a sweep does not see it."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for key in os.environ.keys() - before.keys():  # not `clear`: the compiler of the kernel runs in a thread
            del os.environ[key]
        os.environ.update(before)


def register(recipes_from: tuple[str, ...] = ()) -> None:
    """Make the registry, the sections and ``${launched:FORMAT}`` known to every composition from now on.

    The sections are open nodes for a primary config to begin with. Hydra closes the composed config, so that
    ``mixed_precision.fp8_margin=2`` would be refused unless the recipe states that field already. In an open section
    any key can be set; whether there is such a field is judged against the real class when the config is decoded.
    """
    register_group(*recipes_from)
    ours = {name: dataclasses.asdict(section()) for name, section in SECTIONS.items()}
    keys = dict.fromkeys((RECIPES, *RUN_KEYS)) | {"precision_backend": "auto"}
    opened = (PRECISION, "silence", *OWNERS)
    sections = OmegaConf.create({**keys, **{name: {} for name in opened}, **ours})
    for name in (*opened, *SECTIONS):
        OmegaConf.set_struct(sections[name], False)
    ConfigStore.instance().store(name="sections", node=sections, provider="bridge.front")
    OmegaConf.register_new_resolver("launched", _launched, use_cache=True, replace=True)


def _launched(pattern: str) -> str:
    """Return the time of the launch: every process of a ``torchrun`` reads the clock of their common parent."""
    if "RANK" not in os.environ:
        return datetime.now().astimezone().strftime(pattern)
    import psutil  # for a launch of several processes alone

    started: float = psutil.Process(os.getppid()).create_time()
    return datetime.fromtimestamp(started).astimezone().strftime(pattern)


@contextmanager
def bounded_references() -> Iterator[None]:
    """Let OmegaConf refuse references that multiply, for the length of a ``with`` block.

    It resolves a reference (``${...}``) as often as it is named: thirty lines of ``a: ${b}${b}`` would make a gigabyte.
    """
    resolve, numbers = Container.resolve_parse_tree, itertools.count(1)

    def bounded(self: Container, *arguments: Any, **named: Any) -> Any:
        found = resolve(self, *arguments, **named) if next(numbers) <= MAX_REFERENCES else None
        if found is None or (isinstance(found, str) and len(found) > MAX_CHARACTERS):
            raise InterpolationResolutionError("references that multiply are refused")
        return found

    Container.resolve_parse_tree = bounded  # type: ignore[method-assign]
    try:
        yield
    finally:
        Container.resolve_parse_tree = resolve  # type: ignore[method-assign]


class BoundedRepository(ConfigRepository):
    """Hydra's repository of configs, whose files are looked at before Hydra reads them."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Return a config; RunConfigError for a file too large or deep, with multiplying aliases or a foreign tag."""
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is not None and source.scheme() == "file":
            require_bounded(Path(source.path) / source._normalize_file_name(config_path), error=RunConfigError)  # noqa: SLF001
        return super().load_config(config_path)


@dataclass(frozen=True)
class Search:
    """The folders that configs are looked up in, and the name of the primary one."""

    main: str
    """Folder of the primary config, or ``pkg://module``."""
    config_name: str = "config"
    extra: Path | str | None = None
    """Another folder, of a team's own groups."""

    def path(self) -> ConfigSearchPath:
        """Return Hydra's search path."""
        found = create_config_search_path(self.main)
        if self.extra:
            folder = Path(self.extra)
            if not folder.is_dir():
                raise RunConfigError.of("--config-dir", "there is no such folder", str(folder), "Give an existing one.")
            schema = SearchPathQuery(provider="schema", path=None)
            found.prepend("command-line", f"file://{folder.resolve()}", anchor=schema)
        return found

    def primary(self, key: str) -> Any:
        """Return what the primary config itself has under `key`, or None."""
        found = BoundedRepository(self.path()).load_config(self.config_name)
        with bounded_references():
            return OmegaConf.select(found.config, key) if found and isinstance(found.config, DictConfig) else None


class Loader(ConfigLoaderImpl):
    """Hydra's loader, which keeps the config that it composed last and the layers that it was composed of."""

    layers: tuple[Layer, ...] = ()
    recipes: Mapping[str, MixedPrecisionConfig] = MappingProxyType({})
    last: tuple[Any, DictConfig] | None = None

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = BoundedRepository(config_search_path)

    def load_configuration(
        self, config_name: str | None, overrides: list[str], run_mode: RunMode, *others: Any, **options: Any
    ) -> DictConfig:
        """Compose; the config that was composed last is returned as it is where Hydra asks for it again."""
        asked = (config_name, tuple(overrides), run_mode)
        if self.last is None or self.last[0] != asked:
            self.last = asked, super().load_configuration(config_name, overrides, run_mode, *others, **options)
        return self.last[1]

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Compose a job of a sweep; the variables that its recipe sets are set again within the job, by `retraced`."""
        with own_environment():
            return super().load_sweep_config(master_config, sweep_overrides)

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        self.trace(defaults, repo)
        return super()._compose_config_from_defaults_list(defaults, repo)

    def __getstate__(self) -> dict[str, Any]:  # to the process of a sweep's job, which composes by itself
        return {**vars(self), "last": None}

    def trace(self, defaults: Iterable[ResultDefault], repository: IConfigRepository) -> None:
        """Note the layers of a defaults list, and the recipes that the registry made for them."""
        self.layers = tuple(_layers(defaults, repository))
        sources = [source for source in repository.get_sources() if isinstance(source, RecipeSource)]
        self.recipes = {name: recipe for source in sources for name, recipe in source.made.items()}


@dataclass(frozen=True, kw_only=True)
class Composition:
    """A composed config and its history."""

    config: DictConfig
    loader: Loader
    origins: Origins
    choice: str | None
    """The chosen option of the group `mixed_precision`."""
    recipe: MixedPrecisionConfig | None
    """The recipe of that name as the registry made it; None for a YAML file."""

    @classmethod
    def of(cls, config: DictConfig, hydra: DictConfig, loader: Loader) -> Composition:
        """Return a config that the loader composed, and Hydra's node of it."""
        choice = hydra.runtime.choices.get(PRECISION)
        origins = _origins(loader.layers, hydra)
        made = loader.recipes.get(recipe_name(f"{PRECISION}/{choice}") or "")
        return cls(config=config, loader=loader, origins=origins, choice=choice, recipe=made)

    def given(self, *, name: str = "config", missing: bool = True) -> GivenRun:
        """Return the config as plain data with its references resolved; `missing` leaves out what is ``???``.

        RunConfigError with everything that has no value, no such section, or would be instantiated.
        """
        if not missing:
            self._require_complete()
        try:
            with bounded_references():
                resolved: Any = OmegaConf.to_container(self.config, resolve=True)
        except OmegaConfBaseException as error:
            path = error.full_key or "the configuration"
            why = str(error.msg or error).partition("\n")[0].rstrip(".")
            text = f"{path}: cannot be resolved: {why} ({self.origins.of(path)}). Correct the reference."
            raise RunConfigError(text) from error
        sections: dict[str, Any] = _without_missing(resolved)
        problems = Problems(self.origins)
        problems.refuse_sections(sections)
        problems.raise_any()
        return GivenRun(sections=sections, choice=self.choice, recipe=self.recipe, origins=self.origins, name=name)

    def _require_complete(self) -> None:
        held = leaves(OmegaConf.to_container(self.config, resolve=False), "")
        absent = sorted(path for path, value in held.items() if value == "???")
        if absent:
            needs = "needs a value" if len(absent) == 1 else "need values"
            places = ", ".join(sorted({self.origins.of(path) for path in absent}))
            remedy = " ".join(f"{path}=VALUE" for path in absent)
            raise RunConfigError(f"{', '.join(absent)}: {needs}, got ??? ({places}). Give {remedy}.")


def parsed_overrides(overrides: Sequence[str]) -> list[Override]:
    """Return the overrides as Hydra parses them; RunConfigError for a word that is none."""
    with in_our_words(overrides):
        return OverridesParser.create().parse_overrides(as_hydra_reads(overrides))


def as_hydra_reads(overrides: Sequence[str]) -> list[str]:
    """Return overrides with ``SECTION=null`` as ``~SECTION``: Hydra takes no null for a group."""
    nulls = {f"{key}=null": f"~{key}" for key in KEYS if key not in RUN_KEYS}
    return [nulls.get(word, word) for word in overrides]


def _without_missing(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_missing(inner) for key, inner in value.items() if inner != "???"}
    return value


def prepared(search: Search, overrides: Sequence[str], *, trust: bool = True) -> Loader:
    """Load the recipes that are asked for, refuse overrides of unknown sections, and return the loader.

    Without `trust`, `recipes_from` of the primary config is a `BridgeWarning` and is not run.
    """
    version.setbase(VERSION_BASE)
    setup_globals()
    parsed = parsed_overrides(overrides)
    own = [override for override in parsed if override.key_or_group == RECIPES]
    with in_our_words(overrides):
        if own:
            sources = recipe_sources(None if own[-1].is_delete() else own[-1].value())
        else:
            named: Any = search.primary(RECIPES)
            plain = OmegaConf.to_container(named) if OmegaConf.is_config(named) else named
            sources = trusted_sources(search.config_name, plain, trust=trust)
        register(sources)
        loader = Loader(search.path())
        _refuse_unknown(parsed, loader)
    return loader


@contextmanager
def composed(
    search: Search, overrides: Sequence[str], *, sweep: bool = False, job_name: str = JOB, trust: bool = True
) -> Iterator[Composition]:
    """Compose once, and keep ``${hydra:...}`` references resolvable inside the block.

    With `sweep`, overrides with several values are left out instead of refused. `job_name` names the job and its
    log. `trust` is that of `prepared`.
    """
    loader = prepared(search, overrides, trust=trust)
    JobRuntime.instance().set("name", job_name)
    mode = RunMode.MULTIRUN if sweep else RunMode.RUN
    with in_our_words(overrides, loader.repository), bounded_references():
        whole = loader.load_configuration(search.config_name, as_hydra_reads(overrides), mode)
        if sweep:
            _ = whole.hydra.sweep.dir  # reads the clock once, for the sweep and for the copy
            whole = copy.deepcopy(whole)  # Hydra sweeps over the config as it was composed
        problems = Problems(Origins())  # of what Hydra would instantiate from its own node besides its plugins
        problems.refuse_targets(OmegaConf.to_container(whole.hydra.callbacks), "hydra.callbacks")
        problems.raise_any()
        _resolve_run_folder(whole, sweep=sweep)
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(whole)
    try:
        config = OmegaConf.masked_copy(whole, [str(key) for key in whole if key != "hydra"])
        yield Composition.of(config, whole.hydra, loader)
    finally:
        HydraConfig.instance().cfg = before


def retraced(config: DictConfig, hydra: DictConfig) -> Composition:
    """Return the composition of a config that another loader composed, in the process of a sweep's job say."""
    path = ConfigSearchPathImpl()
    for source in hydra.runtime.config_sources:
        path.append(source.provider, f"{source.schema}://{source.path}")
    loader = Loader(path)
    words: Any = OmegaConf.to_container(hydra.overrides, resolve=False)  # a word may hold a ${reference}
    overrides = [*words["hydra"], *words["task"]]
    defaults = loader.compute_defaults_list(hydra.job.config_name, overrides, RunMode.RUN).defaults
    loader.trace(defaults, loader.repository)
    return Composition.of(config, hydra, loader)


def _refuse_unknown(overrides: Sequence[Override], loader: Loader) -> None:
    problems = Problems(Origins.of_keys((override.key_or_group for override in overrides), COMMAND_LINE))
    for override in overrides:
        key = override.key_or_group
        section = key.partition(".")[0]
        value = (override.input_line or "").partition("=")[2] if override.is_sweep_override() else override.value()
        if loader.repository.group_exists(key):
            names = value if isinstance(value, list) and value else [value]
            if any(isinstance(name, bool | int | float | dict) for name in names):
                problems.add(key, "must be the name of an option", value)
            continue
        if override.is_hydra_override() or section in KEYS:
            continue
        problems.unknown(key, value, "no such section or group", sorted({*KEYS, *loader.list_groups("")}), word=section)
    problems.raise_any()


def _resolve_run_folder(whole: DictConfig, *, sweep: bool) -> None:
    """Give what a job will know about itself a value, as its interpolations are resolved here."""
    hydra = whole.hydra
    held: Any = OmegaConf.to_container(whole).get("logging")  # type: ignore[union-attr]
    own = held.get("run_dir") if isinstance(held, dict) else None
    is_asked = any(word.startswith("hydra.run.dir=") for word in hydra.overrides.hydra)
    with read_write(hydra), open_dict(hydra):
        if isinstance(own, str) and "${" not in own and not sweep and not is_asked:
            hydra.run.dir = own  # the log goes with the run: the folder of the launch may be read-only
        hydra.runtime.output_dir = os.path.abspath(hydra.sweep.dir if sweep else hydra.run.dir)  # noqa: PTH100  as Hydra does
        if sweep:
            hydra.job.num, hydra.job.id = 0, "0"


def _origins(layers: Iterable[Layer], hydra: DictConfig) -> Origins:
    """Return who set the keys: the layers, and the command line on top."""
    origins = Origins.of_layers(layers)
    values = {key: dict(own) for key, own in origins.values.items()}
    words: Any = OmegaConf.to_container(hydra.overrides, resolve=False)
    for override in OverridesParser.create().parse_overrides(words["task"]):
        if override.key_or_group in hydra.runtime.choices or override.is_sweep_override():
            continue
        if override.is_delete():
            values.pop(override.key_or_group, None)
        else:
            for key, value in leaves(override.value(), override.key_or_group).items():
                values.setdefault(key, {})[COMMAND_LINE] = value
    return dataclasses.replace(origins, values=values)


def _layers(defaults: Iterable[ResultDefault], repository: IConfigRepository) -> Iterator[Layer]:
    """Yield the layers of a defaults list, with the keys that each sets.

    RunConfigError for a YAML file with the name of a registered recipe: one of the two would be ignored.
    """
    for default in defaults:
        path = default.config_path or ""
        holders = [source for source in repository.get_sources() if source.is_config(path)]
        if not holders or path.startswith("hydra/") or holders[0].scheme() == "structured":
            continue
        recipe = recipe_name(path)
        others = [source for source in holders if source.scheme() != SCHEME]
        if recipe and others:
            raise RunConfigError(
                f"{path}: is both a registered recipe and a YAML file, got {others[0].full_path()}/{path}.yaml. "
                "Rename the file; its defaults list can name the recipe to build on."
            )
        found = repository.load_config(path)
        values: Any = OmegaConf.to_container(found.config, resolve=False) if found is not None else {}
        if isinstance(values, dict):
            values.pop("defaults", None)
        yield Layer(
            origin=f"recipe {recipe}" if recipe else f"{path}.yaml",
            values=leaves(values, default.package or ""),
            is_recipe=path.startswith(f"{PRECISION}/"),
        )
