"""`compose`: one config of YAML files, recipes and overrides, and the origin of each key.

Hydra composes the config. The origins follow from its defaults list: each entry is a layer, and a
later layer overrides an earlier one. Registered recipes are options of the Hydra group
`mixed_precision` (`bridge.registry.hydra_group`).

Only public parts of Hydra are used: `hydra.compose`, the interface of its config loader, and its
parser of overrides.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NamedTuple

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from bridge.errors import RunConfigError
from bridge.front.errors import translate_errors
from bridge.front.references import refuse_expanding_references
from bridge.front.search import DEFAULT_JOB_NAME, Search
from bridge.precision.stated_field import COMMAND_LINE
from bridge.preflight.origins import ConfigLayer, Origins, flatten_leaves
from bridge.preflight.problems import Problems
from bridge.read.recipe_sources import get_trusted_sources, parse_recipe_sources
from bridge.read.run_input import RunInput
from bridge.read.run_keys import (
    NON_SECTION_KEYS,
    OWNER_SECTIONS,
    PRECISION_KEY,
    RECIPES_KEY,
    RUN_CONFIG_KEYS,
    SECTION_CLASSES,
    refuse_unknown_sections,
)
from bridge.registry.hydra_group import URL_SCHEME, RecipeSource, find_recipe_name, register_group
from bridge.registry.mixed_precision_config import MixedPrecisionConfig

Recipes = Mapping[str, MixedPrecisionConfig]
"""Canonical name -> the recipe as the registry made it."""


class Sweeps(enum.Enum):
    """Whether overrides with several values are legal."""

    REFUSED = "refused"
    ALLOWED = "allowed"
    BY_MODE = "by mode"
    """They are legal if ``hydra.mode`` of the config is MULTIRUN."""


class Composition(NamedTuple):
    """A composed config."""

    run_input: RunInput
    """The sections of the run, without the values that are swept over."""
    hydra_settings: Any
    """Hydra's node of the config, with the folders of the job resolved."""


def compose(
    search: Search,
    overrides: Sequence[str],
    *,
    job_name: str = DEFAULT_JOB_NAME,
    trust: bool = True,
    is_complete: bool = False,
    sweeps: Sweeps = Sweeps.REFUSED,
) -> Composition:
    """Compose the config of a run.

    Args:
        search: The folders of the tree.
        overrides: The arguments of a command line that are not flags.
        job_name: Hydra's name of the job and of its log.
        trust: Whether to run the Python that `recipes_from` of the primary config names. If not,
            a `BridgeWarning` reports that it was left out.
        is_complete: Whether to refuse missing values (``???``). If not, they are left out.
        sweeps: Whether overrides with several values are legal. Legal ones are left out.

    Raises:
        RunConfigError: A key has no value, there is no such section, or an object would be
            instantiated.
    """
    register_with_hydra()
    with search.start_hydra_over_folders(job_name) as loader, translate_errors(overrides, loader):
        parsed = _parse_and_load(search, overrides, loader, trust=trust)
        swept: list[Override] = []
        single: list[str] = []
        for override in parsed:
            if override.is_sweep_override():
                swept.append(override)
            else:
                single.append(str(override.input_line))
        config = hydra.compose(search.config_name, single, return_hydra_config=True)
        is_multirun = config.hydra.mode == RunMode.MULTIRUN
        is_sweep = sweeps is Sweeps.ALLOWED or (sweeps is Sweeps.BY_MODE and is_multirun)
        _refuse_sweeps(swept, is_sweep=is_sweep)
        origins, recipes = _collect_origins(config.hydra, loader)
        plain: Any = OmegaConf.to_container(config)
        refuse_expanding_references(plain, origins)
        # Hydra instantiates the callbacks of its node.
        problems = Problems(Origins())
        problems.refuse_targets(plain["hydra"]["callbacks"], "hydra.callbacks")
        problems.raise_any()
        _resolve_folders(config, plain, is_sweep=is_sweep)
        with _use_hydra_config(config):
            keys = [str(key) for key in config if key != "hydra"]
            run_config = OmegaConf.masked_copy(config, keys)
            run_input = _make_run_input(
                run_config, config.hydra, origins, recipes, is_complete=is_complete
            )
            return Composition(run_input=run_input, hydra_settings=config.hydra)


def read_job_config(config: DictConfig) -> RunInput:
    """Return the sections of a job's config, which Hydra composed.

    It is called within the job, which may run in the process of a sweep.
    """
    settings: Any = HydraConfig.get()
    origins, recipes = _collect_origins(settings, GlobalHydra.instance().config_loader())
    plain: Any = OmegaConf.to_container(config)
    refuse_expanding_references(plain, origins)
    return _make_run_input(config, settings, origins, recipes, is_complete=True)


def load_named_recipes(search: Search, overrides: Sequence[str]) -> None:
    """Load the recipes that a command line or its primary config names.

    Raises:
        RunConfigError: An override is of an unknown section.
    """
    register_with_hydra()
    with search.start_hydra_over_folders() as loader, translate_errors(overrides, loader):
        _parse_and_load(search, overrides, loader, trust=True)


def register_with_hydra() -> None:
    """Register the recipes, the sections and the resolver ``${launched:FORMAT}`` with Hydra.

    The sections are open nodes, and a primary config begins with them. Hydra closes the composed
    config: it would refuse ``mixed_precision.fp8_margin=2`` unless the recipe states that field. In
    an open section any key can be set. Decoding the config looks the key up in the section's class.
    """
    register_group()
    open_sections = (PRECISION_KEY, "silence", *OWNER_SECTIONS)
    nodes: dict[str, Any] = dict.fromkeys((RECIPES_KEY, *NON_SECTION_KEYS))
    nodes["precision_backend"] = "auto"
    for name in open_sections:
        nodes[name] = {}
    for name, section in SECTION_CLASSES.items():
        nodes[name] = dataclasses.asdict(section())
    sections = OmegaConf.create(nodes)
    for name in (*open_sections, *SECTION_CLASSES):
        OmegaConf.set_struct(sections[name], False)
    ConfigStore.instance().store(name="sections", node=sections, provider="bridge.front")
    OmegaConf.register_new_resolver("launched", _format_launch_time, use_cache=True, replace=True)


def _format_launch_time(pattern: str) -> str:
    """Return the time of the launch, which is the same in every process of a ``torchrun``.

    The time is the start of their common parent process.
    """
    if "RANK" not in os.environ:
        return datetime.now().astimezone().strftime(pattern)
    import psutil  # only a launch of several processes needs it

    started: float = psutil.Process(os.getppid()).create_time()
    return datetime.fromtimestamp(started).astimezone().strftime(pattern)


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Return the overrides as Hydra parses them.

    Raises:
        RunConfigError: An argument is not an override.
    """
    with translate_errors(overrides):
        return OverridesParser.create().parse_overrides(rewrite_null_groups(overrides))


def rewrite_null_groups(overrides: Sequence[str]) -> list[str]:
    """Return overrides with ``SECTION=null`` as ``~SECTION``, since Hydra has no null for a group."""
    nulls = {f"{key}=null": f"~{key}" for key in RUN_CONFIG_KEYS if key not in NON_SECTION_KEYS}
    return [nulls.get(word, word) for word in overrides]


def _parse_and_load(
    search: Search, overrides: Sequence[str], loader: ConfigLoader, *, trust: bool
) -> list[Override]:
    """Load the recipes that overrides or the primary config name, and return the parsed overrides."""
    parsed = parse_overrides(overrides)
    recipes_override = None
    for override in parsed:
        if override.key_or_group == RECIPES_KEY:
            recipes_override = override
    if recipes_override is not None:
        named = None
        if not recipes_override.is_delete():
            named = recipes_override.value()
        sources = parse_recipe_sources(named)
    else:
        named = _read_primary_value(search.config_name, RECIPES_KEY, loader)
        sources = get_trusted_sources(search.config_name, named, trust=trust)
    register_group(*sources)
    _refuse_unknown_keys(parsed, loader)
    return parsed


def _read_primary_value(config_name: str, key: str, loader: ConfigLoader) -> Any:
    """Return the value of a key in the primary config itself as plain data, or None without it."""
    for source in loader.get_sources():
        if source.is_config(config_name):
            config = source.load_config(config_name).config
            plain: Any = OmegaConf.to_container(config)
            if not isinstance(plain, dict) or key not in plain:
                return None
            refuse_expanding_references(plain, Origins())
            value: Any = OmegaConf.select(config, key)
            if OmegaConf.is_config(value):
                return OmegaConf.to_container(value, resolve=True)
            return value
    return None


def _refuse_unknown_keys(overrides: Sequence[Override], loader: ConfigLoader) -> None:
    """Refuse overrides of unknown sections, and groups whose option is not a name.

    Raises:
        RunConfigError: An override is refused. The error has all of them.
    """
    keys = [override.key_or_group for override in overrides]
    problems = Problems(Origins.from_keys(keys, COMMAND_LINE))
    sources = loader.get_sources()
    for override in overrides:
        key = override.key_or_group
        section = key.partition(".")[0]
        if override.is_sweep_override():
            value: Any = (override.input_line or "").partition("=")[2]
        else:
            value = override.value()
        if any(source.is_group(key) for source in sources):
            names = [value]
            if isinstance(value, list) and value:
                names = value
            if any(isinstance(name, bool | int | float | dict) for name in names):
                problems.add(key, "must be the name of an option", value)
            continue
        if override.is_hydra_override() or section in RUN_CONFIG_KEYS:
            continue
        known = sorted({*RUN_CONFIG_KEYS, *loader.list_groups("")})
        problems.unknown(key, value, "no such section or group", known, word=section)
    problems.raise_any()


def _refuse_sweeps(overrides: Sequence[Override], *, is_sweep: bool) -> None:
    """Refuse overrides with several values. In a sweep the settings of the run may have several.

    Raises:
        RunConfigError: An override has several values. The error names the first.
    """
    for override in overrides:
        key, _, value = str(override.input_line).partition("=")
        got = f"got {value!r} ({COMMAND_LINE})"
        if is_sweep and override.is_hydra_override():
            raise RunConfigError(f"{key}: Hydra's own settings take one value, {got}. Give one.")
        if not is_sweep:
            remedy = "Add --multirun to run each, or write [a,b] for a list."
            raise RunConfigError(f"{key}: takes one value, {got}. {remedy}")


def _resolve_folders(config: DictConfig, plain: Mapping[str, Any], *, is_sweep: bool) -> None:
    """Resolve the folder of a run or of a sweep in Hydra's node.

    The name of the folder may have the time. It is resolved once, so that the folder that is
    checked here is the folder that Hydra makes.
    """
    settings = config.hydra
    logging = plain.get("logging")
    run_dir = None
    if isinstance(logging, dict):
        run_dir = logging.get("run_dir")
    hydra_overrides = plain["hydra"]["overrides"]["hydra"]
    is_stated = any(override.startswith("hydra.run.dir=") for override in hydra_overrides)
    with read_write(settings), open_dict(settings):
        if is_sweep:
            # A sweep has no job yet. The interpolations of its folder may name the job.
            settings.job.num, settings.job.id = 0, "0"
        elif isinstance(run_dir, str) and "${" not in run_dir and not is_stated:
            # The log is in the run folder: the folder of the launch may be read-only.
            settings.run.dir = run_dir
    node = settings.run
    if is_sweep:
        node = settings.sweep
    with _use_hydra_config(config):
        folder = str(node.dir)  # reads the clock, once
    with read_write(settings), open_dict(settings):
        node.dir = folder
        settings.runtime.output_dir = os.path.abspath(folder)  # noqa: PTH100  as Hydra does


@contextmanager
def _use_hydra_config(config: DictConfig) -> Iterator[None]:
    """Let ``${hydra:...}`` refer to the node of this config in a ``with`` block."""
    singleton = HydraConfig.instance()
    before = singleton.cfg
    singleton.set_config(config)
    try:
        yield
    finally:
        singleton.cfg = before


def _collect_origins(settings: Any, loader: ConfigLoader) -> tuple[Origins, Recipes]:
    """Return the origins of the keys of a composed config, and its registered recipes.

    The command line overrides the layers of the defaults list.

    Args:
        settings: Hydra's node of the config.
        loader: Hydra's loader of configs.
    """
    # The overrides are not resolved, because an override may have a ${reference}.
    overrides: Any = OmegaConf.to_container(settings.overrides)
    all_overrides = [*overrides["hydra"], *overrides["task"]]
    defaults = loader.compute_defaults_list(
        settings.job.config_name, all_overrides, RunMode.RUN
    ).defaults
    sources = _list_sources(settings, loader)
    (registered,) = [source for source in sources if isinstance(source, RecipeSource)]
    layers = []
    recipes = {}
    for default in defaults:
        name = find_recipe_name(default.config_path or "")
        if name is not None:
            recipes[name] = registered.recipe(name)
        layer = _make_layer(default, sources, recipes)
        if layer is not None:
            layers.append(layer)
    origins = Origins.from_layers(layers)
    values = {key: dict(setters) for key, setters in origins.values.items()}
    for override in OverridesParser.create().parse_overrides(overrides["task"]):
        if override.key_or_group in settings.runtime.choices or override.is_sweep_override():
            continue
        if override.is_delete():
            values.pop(override.key_or_group, None)
        else:
            for key, value in flatten_leaves(override.value(), override.key_or_group).items():
                values.setdefault(key, {})[COMMAND_LINE] = value
    return dataclasses.replace(origins, values=values), recipes


def _list_sources(settings: Any, loader: ConfigLoader) -> list[ConfigSource]:
    """Return the sources of configs in Hydra's order, with the sources of ``hydra.searchpath``."""
    # The last source has the configs that code defines.
    *sources, structured = loader.get_sources()
    kinds: dict[str, Any] = {}
    for kind in Plugins.instance().discover(ConfigSource):
        kinds[kind.scheme()] = kind  # type: ignore[attr-defined]
    for entry in settings.runtime.config_sources:
        if entry.provider.startswith("hydra.searchpath"):
            kind = kinds[entry.schema]
            sources.append(kind(entry.provider, f"{entry.schema}://{entry.path}"))
    return [*sources, structured]


def _make_layer(
    default: ResultDefault, sources: Sequence[ConfigSource], recipes: Recipes
) -> ConfigLayer | None:
    """Return the layer of an entry of a defaults list, or None for nodes of Hydra and of code.

    Raises:
        RunConfigError: The entry is both a registered recipe and a YAML file. Hydra would ignore
            one of the two.
    """
    path = default.config_path or ""
    holders, others = [], []
    for source in sources:
        if source.is_config(path):
            holders.append(source)
            if source.scheme() != URL_SCHEME:
                others.append(source)
    if not holders or path.startswith("hydra/") or holders[0].scheme() == "structured":
        return None
    recipe = find_recipe_name(path)
    if recipe is not None and others:
        raise RunConfigError(
            f"{path}: is both a registered recipe and a YAML file, "
            f"got {others[0].full_path()}/{path}.yaml. "
            "Rename the file; its defaults list can name the recipe to build on."
        )
    values: dict[str, Any] = {}
    if recipe is not None:
        origin = f"recipe {recipe}"
        values = recipes[recipe].to_dict()
    else:
        origin = f"{path}.yaml"
        plain: Any = OmegaConf.to_container(holders[0].load_config(path).config)
        if isinstance(plain, dict):
            values = dict(plain)
            values.pop("defaults", None)
    is_recipe = path.startswith(f"{PRECISION_KEY}/")
    return ConfigLayer(
        origin=origin, values=flatten_leaves(values, default.package or ""), is_recipe=is_recipe
    )


def _make_run_input(
    config: DictConfig, settings: Any, origins: Origins, recipes: Recipes, *, is_complete: bool
) -> RunInput:
    """Return the sections of a composed config, with its references resolved.

    Raises:
        RunConfigError: A key has no value, there is no such section, or an object would be
            instantiated.
    """
    if is_complete:
        _require_complete(config, origins)
    try:
        resolved: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        path = error.full_key or "the configuration"
        why = str(error.msg or error).partition("\n")[0].rstrip(".")
        origin = origins.get_origin(path)
        message = f"{path}: cannot be resolved: {why} ({origin}). Correct the reference."
        raise RunConfigError(message) from error
    sections: dict[str, Any] = _drop_missing(resolved)
    problems = Problems(origins)
    refuse_unknown_sections(sections, problems)
    problems.raise_any()
    choice = settings.runtime.choices.get(PRECISION_KEY)
    recipe = recipes.get(find_recipe_name(f"{PRECISION_KEY}/{choice}") or "")
    return RunInput(
        sections=sections,
        choice=choice,
        recipe=recipe,
        origins=origins,
        name=settings.job.config_name,
    )


def _require_complete(config: DictConfig, origins: Origins) -> None:
    """Refuse a config with missing values (``???``).

    Raises:
        RunConfigError: Values are missing. The error names all of them.
    """
    values = flatten_leaves(OmegaConf.to_container(config, resolve=False), "")
    absent = sorted(path for path, value in values.items() if value == "???")
    if not absent:
        return
    needs = "need values"
    if len(absent) == 1:
        needs = "needs a value"
    sources = ", ".join(sorted(set(map(origins.get_origin, absent))))
    remedy = " ".join(f"{path}=VALUE" for path in absent)
    raise RunConfigError(f"{', '.join(absent)}: {needs}, got ??? ({sources}). Give {remedy}.")


def _drop_missing(value: Any) -> Any:
    """Return plain data without the keys whose values are missing (``???``)."""
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, inner in value.items():
        if inner != "???":
            kept[str(key)] = _drop_missing(inner)
    return kept
