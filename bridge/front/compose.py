"""Composition: Hydra makes one config of YAML files, recipes and overrides.

The layer that set each key is found out from the composed config.

Of Hydra only public parts are used: `hydra.compose`, the interface of its config loader, and its
parser of overrides. Registered recipes are options of the Hydra group `mixed_precision`
(`bridge.registry.hydra_group`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

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
from bridge.precision.fields import COMMAND_LINE
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
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.hydra_group import URL_SCHEME, RecipeSource, find_recipe_name, register_group

Recipes = Mapping[str, MixedPrecisionConfig]
"""Canonical name -> the recipe as the registry made it."""


def compose(
    search: Search,
    overrides: Sequence[str],
    *,
    job_name: str = DEFAULT_JOB_NAME,
    trust: bool = True,
    is_complete: bool = False,
    may_sweep: bool | None = False,
) -> tuple[RunInput, Any]:
    """Compose a run once, and return it with Hydra's own node of the config.

    The folders in that node are resolved.

    Args:
        search: The folders of the tree.
        overrides: The words of a command line that are no flags.
        job_name: Hydra's name of the job and of its log.
        trust: Run the Python that `recipes_from` of the primary config names; else it is a
            `BridgeWarning`.
        is_complete: Refuse values that are missing (``???``); else they are left out.
        may_sweep: Leave overrides with several values out; None: where ``hydra.mode`` is MULTIRUN.
            Else they are refused.

    Raises:
        RunConfigError: Everything that has no value, no such section, or would be instantiated.
    """
    register_with_hydra()
    with search.start_hydra_over_folders(job_name) as loader, translate_errors(overrides, loader):
        parsed = _parse_and_load(search, overrides, loader, trust=trust)
        swept: list[Override] = []
        words: list[str] = []
        for override in parsed:
            if override.is_sweep_override():
                swept.append(override)
            else:
                words.append(str(override.input_line))
        whole = hydra.compose(search.config_name, words, return_hydra_config=True)
        is_sweep = may_sweep or (may_sweep is None and whole.hydra.mode == RunMode.MULTIRUN)
        _refuse_sweeps(swept, is_sweep=is_sweep)
        origins, recipes = _collect_origins(whole.hydra, loader)
        plain: Any = OmegaConf.to_container(whole)
        refuse_expanding_references(plain, origins)
        # Hydra would instantiate the callbacks of its own node, besides its plugins.
        problems = Problems(Origins())
        problems.refuse_targets(plain["hydra"]["callbacks"], "hydra.callbacks")
        problems.raise_any()
        _resolve_folders(whole, plain, is_sweep=is_sweep)
        with _use_hydra_config(whole):
            kept = [str(key) for key in whole if key != "hydra"]
            config = OmegaConf.masked_copy(whole, kept)
            given = _make_given_run(config, whole.hydra, origins, recipes, is_complete=is_complete)
            return given, whole.hydra


def read_job_config(config: DictConfig) -> RunInput:
    """Return the run of a job's config, which Hydra composed; called within the job.

    The job may run in the process of a sweep.
    """
    settings: Any = HydraConfig.get()
    origins, recipes = _collect_origins(settings, GlobalHydra.instance().config_loader())
    plain: Any = OmegaConf.to_container(config)
    refuse_expanding_references(plain, origins)
    return _make_given_run(config, settings, origins, recipes, is_complete=True)


def load_named_recipes(search: Search, overrides: Sequence[str]) -> None:
    """Load the recipes that a command line or its primary config names.

    Overrides of unknown sections are refused.
    """
    register_with_hydra()
    with search.start_hydra_over_folders() as loader, translate_errors(overrides, loader):
        _parse_and_load(search, overrides, loader, trust=True)


def register_with_hydra() -> None:
    """Make the registry, the sections and ``${launched:FORMAT}`` known to every composition.

    The sections are open nodes for a primary config to begin with. Hydra closes the composed
    config, so that ``mixed_precision.fp8_margin=2`` would be refused unless the recipe states that
    field already. In an open section any key can be set; whether there is such a field is judged
    against the real class when the config is decoded.
    """
    register_group()
    opened = (PRECISION_KEY, "silence", *OWNER_SECTIONS)
    nodes: dict[str, Any] = dict.fromkeys((RECIPES_KEY, *NON_SECTION_KEYS))
    nodes["precision_backend"] = "auto"
    for name in opened:
        nodes[name] = {}
    for name, section in SECTION_CLASSES.items():
        nodes[name] = dataclasses.asdict(section())
    sections = OmegaConf.create(nodes)
    for name in (*opened, *SECTION_CLASSES):
        OmegaConf.set_struct(sections[name], False)
    ConfigStore.instance().store(name="sections", node=sections, provider="bridge.front")
    OmegaConf.register_new_resolver("launched", _format_launch_time, use_cache=True, replace=True)


def _format_launch_time(pattern: str) -> str:
    """Return the time of the launch.

    Every process of a ``torchrun`` reads the clock of their common parent.
    """
    if "RANK" not in os.environ:
        return datetime.now().astimezone().strftime(pattern)
    import psutil  # for a launch of several processes alone

    started: float = psutil.Process(os.getppid()).create_time()
    return datetime.fromtimestamp(started).astimezone().strftime(pattern)


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Return the overrides as Hydra parses them; RunConfigError for a word that is none."""
    with translate_errors(overrides):
        return OverridesParser.create().parse_overrides(rewrite_null_groups(overrides))


def rewrite_null_groups(overrides: Sequence[str]) -> list[str]:
    """Return overrides with ``SECTION=null`` as ``~SECTION``: Hydra takes no null for a group."""
    nulls = {f"{key}=null": f"~{key}" for key in RUN_CONFIG_KEYS if key not in NON_SECTION_KEYS}
    return [nulls.get(word, word) for word in overrides]


def _parse_and_load(
    search: Search, overrides: Sequence[str], loader: ConfigLoader, *, trust: bool
) -> list[Override]:
    """Return the parsed overrides, with the recipes loaded that they or the primary config name."""
    parsed = parse_overrides(overrides)
    naming = None
    for override in parsed:
        if override.key_or_group == RECIPES_KEY:
            naming = override
    if naming is not None:
        named = None
        if not naming.is_delete():
            named = naming.value()
        sources = parse_recipe_sources(named)
    else:
        named = _read_primary_value(search.config_name, RECIPES_KEY, loader)
        sources = get_trusted_sources(search.config_name, named, trust=trust)
    register_group(*sources)
    _refuse_unknown(parsed, loader)
    return parsed


def _read_primary_value(config_name: str, key: str, loader: ConfigLoader) -> Any:
    """Return what the primary config itself has under `key`, as plain data.

    None where it has nothing.
    """
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


def _refuse_unknown(overrides: Sequence[Override], loader: ConfigLoader) -> None:
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
    """Refuse overrides with several values.

    They are legal in a sweep, except for Hydra's own settings.
    """
    for override in overrides:
        key, _, value = str(override.input_line).partition("=")
        got = f"got {value!r} ({COMMAND_LINE})"
        if is_sweep and override.is_hydra_override():
            raise RunConfigError(f"{key}: Hydra's own settings take one value, {got}. Give one.")
        if not is_sweep:
            remedy = "Add --multirun to run each, or write [a,b] for a list."
            raise RunConfigError(f"{key}: takes one value, {got}. {remedy}")


def _resolve_folders(whole: DictConfig, plain: Mapping[str, Any], *, is_sweep: bool) -> None:
    """Give a value to each folder of a job, as its interpolations are resolved before it starts."""
    settings = whole.hydra
    logging = plain.get("logging")
    run_dir = None
    if isinstance(logging, dict):
        run_dir = logging.get("run_dir")
    hydra_words = plain["hydra"]["overrides"]["hydra"]
    is_asked = any(word.startswith("hydra.run.dir=") for word in hydra_words)
    with read_write(settings), open_dict(settings):
        if is_sweep:
            settings.job.num, settings.job.id = 0, "0"
        elif isinstance(run_dir, str) and "${" not in run_dir and not is_asked:
            # The log goes with the run: the folder of the launch may be read-only.
            settings.run.dir = run_dir
    place = settings.sweep if is_sweep else settings.run
    with _use_hydra_config(whole):
        folder = str(place.dir)  # reads the clock, once
    with read_write(settings), open_dict(settings):
        place.dir = folder
        settings.runtime.output_dir = os.path.abspath(folder)  # noqa: PTH100  as Hydra does


@contextmanager
def _use_hydra_config(whole: DictConfig) -> Iterator[None]:
    """Let ``${hydra:...}`` mean this config's node in a ``with`` block."""
    singleton = HydraConfig.instance()
    before = singleton.cfg
    singleton.set_config(whole)
    try:
        yield
    finally:
        singleton.cfg = before


def _collect_origins(settings: Any, loader: ConfigLoader) -> tuple[Origins, Recipes]:
    """Return who set the keys of a composed config, and the recipes in it.

    `settings` is Hydra's node of the config.

    The command line is over the layers of the defaults list.
    """
    words: Any = OmegaConf.to_container(settings.overrides)  # a word may hold a ${reference}
    every = [*words["hydra"], *words["task"]]
    defaults = loader.compute_defaults_list(settings.job.config_name, every, RunMode.RUN).defaults
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
    values = {key: dict(of_key) for key, of_key in origins.values.items()}
    for override in OverridesParser.create().parse_overrides(words["task"]):
        if override.key_or_group in settings.runtime.choices or override.is_sweep_override():
            continue
        if override.is_delete():
            values.pop(override.key_or_group, None)
        else:
            for key, value in flatten_leaves(override.value(), override.key_or_group).items():
                values.setdefault(key, {})[COMMAND_LINE] = value
    return dataclasses.replace(origins, values=values), recipes


def _list_sources(settings: Any, loader: ConfigLoader) -> list[ConfigSource]:
    """Return the sources of configs in Hydra's order, those of ``hydra.searchpath`` too."""
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
    """Return an entry of a defaults list with the keys that it sets.

    None for the nodes of Hydra and of code.

    RunConfigError for a YAML file with the name of a registered recipe: one of the two would be
    ignored.
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


def _make_given_run(
    config: DictConfig, settings: Any, origins: Origins, recipes: Recipes, *, is_complete: bool
) -> RunInput:
    """Return a composed config as plain data with its references resolved.

    RunConfigError with everything that has no value, no such section, or would be instantiated.
    """
    if is_complete:
        _require_complete(config, origins)
    try:
        resolved: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        path = error.full_key or "the configuration"
        why = str(error.msg or error).partition("\n")[0].rstrip(".")
        text = f"{path}: cannot be resolved: {why} ({origins.get_origin(path)}). Correct the reference."
        raise RunConfigError(text) from error
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
    values = flatten_leaves(OmegaConf.to_container(config, resolve=False), "")
    absent = sorted(path for path, value in values.items() if value == "???")
    if not absent:
        return
    needs = "need values"
    if len(absent) == 1:
        needs = "needs a value"
    places = ", ".join(sorted(set(map(origins.get_origin, absent))))
    remedy = " ".join(f"{path}=VALUE" for path in absent)
    raise RunConfigError(f"{', '.join(absent)}: {needs}, got ??? ({places}). Give {remedy}.")


def _drop_missing(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, inner in value.items():
        if inner != "???":
            kept[str(key)] = _drop_missing(inner)
    return kept
