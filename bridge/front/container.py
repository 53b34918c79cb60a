"""A run's values become a `ConfigContainer`: every key checked, every value decoded, all faults reported at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.errors import BridgeError, RunConfigError
from bridge.front.loader import RunValues, decoded_sections, run_of
from bridge.front.sections import SECTIONS
from bridge.precision.dtypes import torch_dtype
from bridge.training.config import ConfigContainer

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["container"]


def container(run: RunValues | Mapping[str, Any]) -> ConfigContainer:
    """Return the container of a run. Imports Megatron Core.

    Args:
        run: A run's values, or plain data in the sections of one.

    Raises:
        RunConfigError: Keys or values that cannot be used: all of them.
        PrecisionConfigError: The precision can never be right.
    """
    if not isinstance(run, RunValues):
        run = run_of(run, missing=False)
    owners, functions = _owners()
    ours = decoded_sections(run, SECTIONS)
    arguments = decoded_sections(run, owners, functions)
    run.problems.raise_any()
    if run.precision is not None:
        run.precision.finalize()
        _set_pipeline_dtype(arguments["model"], run.precision)
    return ConfigContainer(
        **{name: _made(name, cls, arguments[name]) for name, cls in owners.items()},
        **{name: cls(**ours[name]) for name, cls in SECTIONS.items()},
        **run.run_keys,
        mixed_precision=run.precision,
        precision_choice=run.choice.to_dict() if run.choice is not None else None,
    )


def _owners() -> tuple[dict[str, type[Any]], dict[str, Any]]:
    """Return Megatron Core's class of each section, and for fields that hold a function the ones that can be named."""
    from bridge.megatron.gpt import ACTIVATIONS, GPTConfig  # heavy
    from bridge.megatron.owners import DistributedDataParallelConfig, OptimizerConfig

    classes = {"model": GPTConfig, "optimizer": OptimizerConfig, "ddp": DistributedDataParallelConfig}
    return classes, {"activation_func": ACTIVATIONS}


def _made(name: str, owner: type[Any], arguments: dict[str, Any]) -> Any:
    try:
        return owner(**arguments)
    except BridgeError:
        raise
    except Exception as error:  # Megatron's checks raise exceptions of any class
        why = f"{type(error).__name__}: {error}".rstrip(": .")
        remedy = "Correct the fields it is about."
        raise RunConfigError(f"{name}: Megatron Core refuses these settings ({why}). {remedy}") from error


def _set_pipeline_dtype(model: dict[str, Any], precision: Any) -> None:
    """Give the model the precision's pipeline dtype at once where Megatron refuses to build its config without one."""
    if model.get("pipeline_model_parallel_size", 1) > 1 and model.get("pipeline_dtype") is None:
        model["pipeline_dtype"] = torch_dtype(precision.to_dict().get("pipeline_dtype", precision.mode))
