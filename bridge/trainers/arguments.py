"""Lightning, Accelerate, the Hugging Face Trainer and NeMo 2: the arguments that their own objects take."""

import logging
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from bridge.errors import PayloadError
from bridge.interop.accelerate import FUNCTION, HANDLERS
from bridge.interop.contract import ExportReport
from bridge.interop.pytorch.torchao import FILTER, module_filter
from bridge.interop.systems import system
from bridge.precision.mode import label_of
from bridge.precision.values import torch_dtype
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import get_mixed_precision_config

DECISIVE = frozenset({"fp8", "fp4", "autocast_enabled", "modules"})
"""Fields without which a run computes in another format than the recipe says."""

log = logging.getLogger(__name__)


def exported(name: str, recipe: str | MixedPrecisionConfig, **context: Any) -> ExportReport:
    """Return a recipe as `system(name)` writes it; log each stated field that the trainer has no exact setting for.

    Raises:
        PayloadError: The trainer cannot run the format or the autocast of the recipe.
        PrecisionConfigError: The precision can never be right.
        UnknownRecipeError: No such recipe.
    """
    config = get_mixed_precision_config(recipe)
    config.finalize()
    written = system(name)
    report = written.export(config, **context)
    missing = [entry for entry in report.unmapped if entry.field in DECISIVE]
    if missing:
        lines = [f"{written.title} cannot run {label_of(config)}:", *(f"  {entry}" for entry in missing)]
        raise PayloadError("\n".join(lines))
    for entry in report.unmapped:
        log.warning("%s: %s", written.title, entry)
    return report


def lightning_arguments(recipe: str | MixedPrecisionConfig, *, strategy: str | None = None) -> dict[str, Any]:
    """Return the arguments of Lightning's `Trainer` or `Fabric`: `precision`, or a precision plugin in `plugins`.

    Args:
        recipe: A recipe's name, or a config.
        strategy: "fsdp" or "deepspeed" where the Trainer will use it.

    Raises:
        PayloadError: Lightning cannot run the recipe's format.
        ImportError: The recipe needs a plugin whose package is not installed.
    """
    payload: dict[str, Any] = exported("lightning", recipe, strategy=strategy).payload
    return {name: _made(value) for name, value in payload.items()}


def accelerate_arguments(recipe: str | MixedPrecisionConfig, *, num_layers: int | None = None) -> dict[str, Any]:
    """Return the arguments of Accelerate's `Accelerator`: `mixed_precision` and `kwargs_handlers`.

    Args:
        recipe: A recipe's name, or a config.
        num_layers: Layers of the model, where the recipe chooses single layers.

    Raises:
        PayloadError: Accelerate cannot run the recipe's format.
        ImportError: accelerate, or the FP8 library that the recipe needs, is not installed.
    """
    return accelerator_arguments(exported("accelerate", recipe, form="arguments", num_layers=num_layers).payload)


def accelerator_arguments(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Accelerator` for an export of the form "arguments". Imports accelerate."""
    from accelerate import utils

    names = [name for name in (*HANDLERS.values(), "GradScalerKwargs") if name in payload]
    given = {name: dict(payload[name]) for name in names}
    for arguments in given.values():
        if FILTER in arguments:
            arguments[FUNCTION] = module_filter(arguments.pop(FILTER))
    handlers = [getattr(utils, name)(**arguments) for name, arguments in given.items()]
    return {"mixed_precision": payload["mixed_precision"], "kwargs_handlers": handlers}


def transformers_arguments(recipe: str | MixedPrecisionConfig) -> dict[str, Any]:
    """Return the arguments of transformers' `TrainingArguments`: `bf16`, `fp16` and `tf32`.

    Raises:
        PayloadError: The recipe needs FP8 or FP4, which `TrainingArguments` has no argument for.
    """
    payload: dict[str, Any] = exported("huggingface", recipe).payload
    return payload


def nemo_plugin(recipe: str | MixedPrecisionConfig) -> Any:
    """Return NeMo 2's `MegatronMixedPrecision` for the `plugins` of its Trainer.

    Raises:
        ImportError: NeMo is not installed.
    """
    payload = dict(exported("nemo2", recipe).payload)
    plugin = _named(payload.pop("_target_"))
    return plugin(**{name: _made(value) for name, value in payload.items()})


def _made(value: Any) -> Any:
    """Return the object that plain data describes, as LightningCLI makes it: ``class_path`` with ``init_args``."""
    if isinstance(value, list):
        return [_made(inner) for inner in value]
    if isinstance(value, dict) and "class_path" in value:
        return _named(value["class_path"])(**{name: _made(inner) for name, inner in value["init_args"].items()})
    if isinstance(value, str) and value.startswith("torch."):
        return torch_dtype(value.removeprefix("torch."))
    return value


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
