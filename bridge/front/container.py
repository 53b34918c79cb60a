"""A composed config becomes a `ConfigContainer`: every key checked, every value decoded, every fault told at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from bridge.errors import BridgeError, PrecisionTypeError, RunConfigError
from bridge.front.decode import decode_fields
from bridge.front.origin import Origins
from bridge.front.plain import plain
from bridge.front.problems import Problems
from bridge.front.sections import BESIDE, SECTIONS
from bridge.precision.auto import is_auto
from bridge.precision.dtypes import torch_dtype
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from bridge.training.config import ConfigContainer

__all__ = ["check", "container", "precision_of"]


Config = DictConfig | Mapping[str, Any]


def container(config: Config, *, origins: Origins | None = None, choice: str | None = None) -> ConfigContainer:
    """Return the run that a composed config describes. Imports Megatron Core.

    Args:
        config: The config, without Hydra's own node.
        origins: Who set its keys, for messages and reports.
        choice: The chosen option of the group `mixed_precision`, if one was chosen.

    Raises:
        RunConfigError: Keys or values that cannot be used: all of them.
        PrecisionConfigError: The precision can never be right.
    """
    owners, functions = _owners()
    origins = origins or Origins()
    problems = Problems(origins)
    values = plain(config, origins)
    chosen = _choose(values, str(choice)) if is_auto(choice) else None
    name = choice if chosen is None else str(chosen["recipe"])
    precision = precision_of(values, name, problems, origins, is_chosen=chosen is not None)
    sections = _sections(values, SECTIONS, problems)
    beside = _beside(values, problems)
    arguments = _sections(values, owners, problems, functions)
    problems.raise_any()
    if precision is not None:
        precision.finalize()
        _place_pipeline_dtype(arguments["model"], precision)
    made = {name: _made(name, cls, arguments[name]) for name, cls in owners.items()}
    ours = {name: cls(**sections[name]) for name, cls in SECTIONS.items()}
    return ConfigContainer(**made, **ours, **beside, mixed_precision=precision, precision_choice=chosen)


def _choose(values: Mapping[str, Any], request: str) -> dict[str, Any]:
    """Return what ``mixed_precision=auto`` comes to on this machine or the declared one."""
    from bridge.preflight.auto import count_parameters, resolve_auto  # reads shapes, for a rare request
    from bridge.preflight.run_check import target_of

    target = target_of(_beside(values, Problems(Origins())).get("target") or "auto")
    return resolve_auto(request, target=target, parameters=count_parameters(values.get("model") or {})).to_dict()


def _beside(values: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """Return the keys beside the sections that are set."""
    found = {key: values[key] for key in BESIDE if values.get(key) is not None}
    if isinstance(found.get("target"), list):  # target=[h100x8,te2.8], which Hydra takes without quotes
        found["target"] = ",".join(map(str, found["target"]))
    if not isinstance(found.get("silence", {}), Mapping):
        problems.add("silence", f"must be a mapping of rules to reasons, got {found['silence']!r}", found["silence"])
    return found


def check(config: Config, *, origins: Origins | None = None, choice: str | None = None) -> None:
    """Check what can be checked without Megatron Core: all but the fields of its classes.

    Missing values (``???``) are no fault here.

    Raises:
        RunConfigError: Keys or values that cannot be used: all of them.
        PrecisionConfigError: The precision can never be right.
    """
    origins = origins or Origins()
    problems = Problems(origins)
    values = plain(config, origins, missing=True)
    chosen_later = is_auto(choice)
    precision = None if chosen_later else precision_of(values, choice, problems, origins)
    _sections(values, SECTIONS, problems)
    _beside(values, problems)
    problems.raise_any()
    if precision is not None:
        precision.finalize()


def _owners() -> tuple[dict[str, type[Any]], dict[str, Any]]:
    """Return Megatron Core's class of each section, and for fields that hold a function the ones that can be named."""
    from bridge.megatron.gpt import ACTIVATIONS, GPTConfig  # heavy
    from bridge.megatron.owners import DistributedDataParallelConfig, OptimizerConfig

    classes = {"model": GPTConfig, "optimizer": OptimizerConfig, "ddp": DistributedDataParallelConfig}
    return classes, {"activation_func": ACTIVATIONS}


def _sections(
    values: Mapping[str, Any],
    classes: Mapping[str, type[Any]],
    problems: Problems,
    functions: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    decoded: dict[str, dict[str, Any]] = {}
    for name, owner in classes.items():
        section = values.get(name) or {}
        if not isinstance(section, dict):
            problems.add(name, f"must be a mapping of fields, got {section!r}. Write {name}.FIELD=VALUE.", section)
            section = {}
        decoded[name] = decode_fields(section, owner, section=name, problems=problems, functions=functions)
    return decoded


def _made(name: str, owner: type[Any], arguments: dict[str, Any]) -> Any:
    try:
        return owner(**arguments)
    except BridgeError:
        raise
    except Exception as error:  # Megatron's checks raise whatever comes to hand
        what = f"{type(error).__name__}: {error}".rstrip(": .")
        remedy = "Correct the fields it is about."
        raise RunConfigError(f"{name}: Megatron Core refuses these settings ({what}). {remedy}") from error


def precision_of(
    values: Mapping[str, Any], choice: str | None, problems: Problems, origins: Origins, *, is_chosen: bool = False
) -> MixedPrecisionConfig | None:
    """Return the precision with each statement's source; None where no option is chosen and nothing is stated.

    With `is_chosen` the values hold what was stated beside a choice, and the recipe's own statements stand besides.
    """
    given = values.get("mixed_precision")
    if isinstance(given, str):
        return REGISTRY.get(given)
    if not given and choice is None:
        return None
    config = REGISTRY.get(choice) if choice is not None and choice in REGISTRY else MixedPrecisionConfig()
    for name in () if is_chosen else config.stated:  # what of the recipe still stands is in the values
        delattr(config, name)
    if is_chosen and given is None:
        given = {}
    if not isinstance(given, dict):
        problems.add("mixed_precision", f"must be a recipe's name or a mapping of fields, got {given!r}", given)
        return None
    by_origin: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        path = f"mixed_precision.{name}"
        if name not in config.field_names():
            problems.unknown(path, value, "no such field", config.field_names())
            continue
        try:
            by_origin.setdefault(origins.of(path), {}).update(type(config).from_dict({name: value}).to_dict())
        except PrecisionTypeError as error:
            problems.add(path, str(error).removeprefix(f"{path}: "), value)
    for origin in sorted(by_origin, key=origins.layer):
        config.state(origin, **by_origin[origin])
    return config


def _place_pipeline_dtype(model: dict[str, Any], precision: MixedPrecisionConfig) -> None:
    """Give the model the precision's pipeline dtype at once where Megatron refuses to build its config without one."""
    if model.get("pipeline_model_parallel_size", 1) > 1 and model.get("pipeline_dtype") is None:
        model["pipeline_dtype"] = torch_dtype(precision.to_dict().get("pipeline_dtype", precision.mode))
