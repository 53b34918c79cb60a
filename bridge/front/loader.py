"""`load_run` and `container`: the values of a run as every command about one reads them, and the `ConfigContainer`.

They come from the Hydra tree of the training script, or from one YAML file that holds the sections itself: a file of
`docs/showcase`, the ``config.yaml`` of a run folder, or the YAML of a Megatron Bridge `ConfigContainer`. Overrides are
the training script's in either case. Neither torch nor Megatron Core is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import bridge
from bridge.errors import BridgeError, PrecisionTypeError, RunConfigError, close_matches, did_you_mean
from bridge.front.bounded_references import bounded_references
from bridge.front.compose import Composition, Search, composed
from bridge.front.config_file import read_config_file
from bridge.front.decode import decode_fields
from bridge.front.files.reading import FileReading
from bridge.front.problems import KEYS, MADE_BY, OWNERS, PRECISION, RUN_KEYS, SECTIONS, Layer, Origins, Problems, leaves
from bridge.precision.dtypes import torch_dtype
from bridge.precision.modules import schemes_of_rows
from bridge.preflight import te_cpu
from bridge.preflight.check import refuse_unknown, resolve_precision, target_of
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY, is_auto
from bridge.rules.fields import NAMES
from bridge.rules.section import read_section
from bridge.rules.shape.model import impossible_sizes
from bridge.rules.topics.names import nearest_fields
from bridge.training.config import ConfigContainer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge.preflight.auto import Choice


PADDING = frozenset({"moe_router_padding_for_quantization", "moe_router_padding_for_fp8"})
"""Fields of the model that Megatron takes together with FP8 or FP4 alone."""


@dataclass(frozen=True, kw_only=True)
class RunValues:
    """A run's values, each section a mapping with Megatron's field names; an absent value was not given."""

    precision: MixedPrecisionConfig | None = None
    """The precision, with what was stated and by whom; None: the owners keep their own settings."""
    choice: Choice | None = None
    """The choice that ``mixed_precision=auto`` was resolved to."""
    sections: Mapping[str, Any] = field(default_factory=dict)
    """Every other key of the run: the sections, `target`, `silence` and `precision_backend`."""
    problems: Problems = field(default_factory=lambda: Problems(Origins()))
    """The faults found so far; `load_run` has raised them."""
    name: str = "config"
    """The file, or the primary config, that was read."""
    reading: FileReading = field(default_factory=FileReading)
    """What a file says besides its sections: its framework, its release, its environment."""

    def section(self, name: str) -> dict[str, Any]:
        """Return a section's values, none where it is absent; the problems take one that is no mapping."""
        section = self.sections.get(name) or {}
        if isinstance(section, dict):
            return section
        self.problems.add(name, "must be a mapping of fields", section, f"Write {name}.FIELD=VALUE.")
        return {}

    @property
    def model(self) -> dict[str, Any]:
        """The model's values."""
        return self.section("model")

    @property
    def optimizer(self) -> dict[str, Any]:
        """The optimizer's values."""
        return self.section("optimizer")

    @property
    def ddp(self) -> dict[str, Any]:
        """The DDP config's values."""
        return self.section("ddp")

    @property
    def target(self) -> str | None:
        """The declared target; None: none is declared."""
        return self.sections.get("target")

    @property
    def origin_of(self) -> Callable[[str], str]:
        """Dotted key ("model.hidden_size") -> who set it."""
        return self.problems.origins.of

    @property
    def run_keys(self) -> dict[str, Any]:
        """The keys that are set and no sections."""
        return {key: self.sections[key] for key in RUN_KEYS if self.sections.get(key) is not None}


def load_run(
    overrides: Sequence[str] = (),
    config_path: Path | str | None = None,
    config_file: Path | str | None = None,
    *,
    config_name: str = "config",
    config_dir: Path | str | None = None,
    strict: bool = True,
    trust: bool = False,
    sections: Mapping[str, Any] | None = None,
) -> RunValues:
    """Return the values that a command line describes.

    Args:
        overrides: As for the training script, ``mixed_precision=bf16_mixed`` or ``target=h100x8`` say.
        config_path: Folder of the Hydra tree; None: what `config_folder` finds.
        config_file: A YAML file with the sections themselves, or a run folder with such a config.yaml, which is read
            instead of the tree; a relative path is looked up here, then in the repository.
        config_name: The tree's primary config, without ``.yaml``.
        config_dir: Another folder, of a team's own groups.
        strict: Refuse a precision that can never be right and misspelt fields of Megatron's. A check, which reports
            both as findings, does without.
        trust: Run the Python that `recipes_from` names in `config_file` or in the primary config.
        sections: As for `read_config_file`.

    Raises:
        RunConfigError: A file, section, key or override that cannot be used.
        PrecisionConfigError: The precision can never be right.
        UnknownRecipeError: No such recipe.
    """
    if config_file is not None:
        read = read_config_file(_file(config_file), overrides, trust=trust, sections=sections)
        run = _run(read.whole, read.choice, read.recipe, read.origins, name=str(config_file))
        run = replace(run, reading=read.reading)
    else:
        search = Search(str(config_folder(config_path)), config_name, config_dir)
        with composed(search, overrides, trust=trust) as composition:
            run = run_of(composition, name=config_name)
        decoded_sections(run, SECTIONS)
    if strict:
        _refuse_misspelt(run)
    run.problems.raise_any()
    if strict and run.precision is not None:
        run.precision.finalize()
    return run


def run_of(
    composition: Composition | Mapping[str, Any], *, name: str = "config", resolve: bool = True, missing: bool = True
) -> RunValues:
    """Return the values of a composed config, or of plain data in the same sections; its problems are not raised yet.

    Without `resolve` a run with ``mixed_precision=auto`` has no precision; `missing` leaves missing values
    (``???``) out.
    """
    if isinstance(composition, Composition):
        values = _plain(composition.config, composition.origins, missing=missing)
        choice, recipe, origins = composition.choice, composition.recipe, composition.origins
        return _run(values, choice, recipe, origins, name=name, resolve=resolve)
    values = _plain(OmegaConf.create(dict(composition)), Origins(), missing=missing)
    return _run(values, None, None, Origins(), name=name, resolve=resolve)


def container(run: RunValues | Mapping[str, Any]) -> ConfigContainer:
    """Return the container of a run's values, or of plain data in the sections of one. Imports Megatron Core."""
    if not isinstance(run, RunValues):
        run = run_of(run, missing=False)
    _declare_te_cpu(run)
    from bridge.megatron.deferred import MegatronDistributedDataParallelConfig, MegatronOptimizerConfig  # heavy
    from bridge.megatron.gpt import ACTIVATIONS, GPTConfig
    from bridge.training.values import early_faults

    owners = {"model": GPTConfig, "optimizer": MegatronOptimizerConfig, "ddp": MegatronDistributedDataParallelConfig}
    functions = {"activation_func": ACTIVATIONS}
    ours = decoded_sections(run, SECTIONS)
    arguments = decoded_sections(run, owners, functions)
    run.problems.raise_any()
    if run.precision is not None:
        run.precision.finalize()
        model = arguments["model"]
        if model.get("pipeline_model_parallel_size", 1) > 1 and model.get("pipeline_dtype") is None:
            # Megatron refuses to build its config without one
            model["pipeline_dtype"] = torch_dtype(run.precision.to_dict().get("pipeline_dtype", run.precision.mode))
        if PADDING & model.keys():  # Megatron asks for FP8 or FP4 before it takes a padding of tokens for it
            low = run.precision.to_dict()
            model |= {name: low[name] for name in ("fp8", "fp8_recipe", "fp4", "fp4_recipe") if low.get(name)}
    made = ConfigContainer(
        **{name: _made(name, cls, arguments[name]) for name, cls in owners.items()},
        **{name: cls(**ours[name]) for name, cls in SECTIONS.items()},
        **run.run_keys,
        mixed_precision=run.precision,
        precision_choice=run.choice.to_dict() if run.choice is not None else None,
        set_by={key: dict(own) for key, own in run.problems.origins.values.items()},
    )
    for fault in early_faults(made, run.origin_of):
        run.problems.add(fault.path, fault.rule, fault.value, fault.remedy, rule_id=fault.id)
    run.problems.raise_any()
    return made


def _declare_te_cpu(run: RunValues) -> None:
    """Declare that this process runs Transformer Engine on its CPU, where the run asks for it."""
    if run.run_keys.get("precision_backend") != te_cpu.BACKEND:
        return
    own = run.model.get("fp4_recipe") if run.model.get("fp4") else run.model.get("fp8_recipe")
    scheme = run.precision.scheme if run.precision is not None else own
    rows = run.precision.reading("modules") if run.precision is not None else None
    te_cpu.declare(run.run_keys.get("target"), schemes=[scheme, *schemes_of_rows(rows)])


def decoded_sections(
    run: RunValues, classes: Mapping[str, type[Any]], functions: Mapping[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """Return the constructor arguments of each section's class; the run's problems take what does not fit."""
    return {
        name: decode_fields(run.section(name), owner, section=name, problems=run.problems, functions=functions)
        for name, owner in classes.items()
    }


def config_folder(given: Path | str | None = None) -> Path:
    """Return the folder of the Hydra tree: `given`, or ``conf`` here, or the one of this package."""
    if given is None:
        return Path("conf").resolve() if Path("conf/config.yaml").is_file() else shipped_folder()
    if _is_there(Path(given)) and Path(given).is_dir():
        return Path(given).resolve()
    matches = close_matches(str(given), [path.name for path in Path().iterdir() if path.is_dir()])
    hint = did_you_mean(matches) or "Give the folder that holds config.yaml, or a file with --config."
    raise RunConfigError.of("--config-path", "there is no such folder", str(given), hint, matches)


def _file(given: Path | str) -> Path:
    """Return the path of a config file: here, or else in the repository."""
    path, shipped = Path(given), shipped_folder().parent / given
    path = shipped if not _is_there(path) and _is_there(shipped) else path
    return path / "config.yaml" if _is_there(path / "config.yaml") else path


def _is_there(path: Path) -> bool:
    """Return whether a path exists; one that is too long does not."""
    try:
        return path.exists()
    except OSError:
        return False


def shipped_folder() -> Path:
    """Return the Hydra tree that comes with this package."""
    return (Path(str(bridge.__file__)).parent / "conf").resolve()


def _run(
    values: Mapping[str, Any],
    choice: str | None,
    recipe: MixedPrecisionConfig | None,
    origins: Origins,
    *,
    name: str,
    resolve: bool = True,
) -> RunValues:
    """Return the run that plain values describe: section -> values, the precision a mapping or a recipe's name.

    `choice` is the option of the group `mixed_precision`; `recipe` is the recipe as the registry made it, None for
    a YAML file's.
    """
    values = dict(values)
    if isinstance(values.get("target"), list):  # target=[h100x8,te2.8], which Hydra takes without quotes
        values["target"] = ",".join(map(str, values["target"]))
    elif values.get("target") is not None:
        values["target"] = str(values["target"])
    target = target_of(values.get("target"))
    stated, made = values.pop(PRECISION, None), None
    is_name = isinstance(stated, str)
    if is_name:
        choice, stated = stated, None
    if is_auto(choice) and not resolve:
        choice, stated, is_name = None, None, False
    elif is_auto(choice):
        choice, made = resolve_precision(choice, values.get("model") or {}, target)
    if is_name or made is not None:
        recipe = REGISTRY.get(str(choice))
        fields = {PRECISION: recipe.to_dict()}
        layer = Layer(origin=f"recipe {recipe.recipe}", values=leaves(fields, ""), is_recipe=True)
        origins = origins.over(layer, instead_of=PRECISION)
        stated = {**fields[PRECISION], **(stated or {})}
    problems = Problems(origins)
    precision = _stated_precision(stated, choice, recipe, problems)
    silence = values.get("silence") or {}
    if isinstance(silence, Mapping):
        refuse_unknown({str(rule): reason for rule, reason in silence.items()})
    else:
        problems.add("silence", "must be a mapping of rules to reasons", silence)
    run = RunValues(precision=precision, choice=made, sections=values, problems=problems, name=name)
    for fault in impossible_sizes(run.model):
        problems.add(fault.path, fault.rule, fault.value, fault.remedy)
    return run


def _stated_precision(
    given: Any, choice: str | None, recipe: MixedPrecisionConfig | None, problems: Problems
) -> MixedPrecisionConfig | None:
    """Return the precision with each statement's origin; None where no option is chosen and nothing is stated.

    The problems take fields that do not exist and values that do not fit.
    """
    if not given and choice is None:
        return None
    config = type(recipe)() if recipe is not None else MixedPrecisionConfig()
    if not isinstance(given, dict):
        problems.add(PRECISION, "must be a recipe's name or a mapping of fields", given)
        return None
    origins = problems.origins
    by_origin: dict[str, dict[str, Any]] = {}
    made_by = given.get(MADE_BY)
    for name, value in given.items():
        path = f"{PRECISION}.{name}"
        if name == MADE_BY:
            continue
        if name not in config.field_names():
            problems.unknown(path, value, "no such field", config.field_names())
            continue
        try:
            by_origin.setdefault(origins.of(path), {}).update(type(config).from_dict({name: value}).to_dict())
        except PrecisionTypeError as error:
            for fault in error.faults:
                problems.add(path, fault.rule, fault.value, fault.remedy)
    ordered = sorted(by_origin, key=origins.rank)
    for origin in (origin for origin in ordered if origin in origins.of_recipe):
        config.state(origin, **by_origin[origin])
    if choice is not None:
        config.made_by(recipe.recipe if recipe is not None and recipe.recipe else choice)
    for origin in (origin for origin in ordered if origin not in origins.of_recipe):
        config.state(origin, **by_origin[origin])
    if made_by is not None:
        own = REGISTRY.get(made_by).to_dict() if made_by in REGISTRY else config.stated_values
        config.made_by(made_by, over=[name for name, value in config.stated_values.items() if own.get(name) != value])
    return config


def _plain(config: DictConfig, origins: Origins, *, missing: bool) -> dict[str, Any]:
    """Return a config as plain data with its interpolations resolved; RunConfigError with all missing values."""
    raw = OmegaConf.to_container(config, resolve=False)
    absent = [] if missing else sorted(path for path, value in leaves(raw, "").items() if value == "???")
    if absent:
        needs = "needs a value" if len(absent) == 1 else "need values"
        places = ", ".join(sorted({origins.of(path) for path in absent}))
        remedy = " ".join(f"{path}=VALUE" for path in absent)
        raise RunConfigError(f"{', '.join(absent)}: {needs}, got ??? ({places}). Give {remedy}.")
    try:
        with bounded_references():
            resolved: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        path = error.full_key or "the configuration"
        why = str(error.msg or error).partition("\n")[0].rstrip(".")
        text = f"{path}: cannot be resolved: {why} ({origins.of(path)}). Correct the reference."
        raise RunConfigError(text) from error
    values: dict[str, Any] = _without_missing(resolved)
    problems = Problems(origins)
    problems.refuse_targets(values)
    for key, value in values.items():
        if key not in KEYS:
            problems.unknown(key, value, "no such section", KEYS)
    problems.raise_any()
    return values


def _without_missing(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_missing(inner) for key, inner in value.items() if inner != "???"}
    return value


def _refuse_misspelt(run: RunValues) -> None:
    """Refuse fields that resemble one of Megatron's; a model provider's own fields resemble none."""
    for key in OWNERS:
        section = run.section(key)
        for name in read_section(key, section).unknown if key in NAMES else ():
            near = nearest_fields(key, name)
            if near:
                run.problems.unknown(f"{key}.{name}", section[name], "no such field", near)


def _made(name: str, owner: type[Any], arguments: dict[str, Any]) -> Any:
    try:
        return owner(**arguments)
    except BridgeError:
        raise
    except Exception as error:  # Megatron's checks raise exceptions of any class
        why = f"{type(error).__name__}: {error}".rstrip(": .")
        remedy = "Correct the fields it is about."
        raise RunConfigError(f"{name}: Megatron Core refuses these settings ({why}). {remedy}") from error
