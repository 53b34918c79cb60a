"""Arguments of the Hugging Face Trainer and of NeMo 2, made from a recipe."""

import logging
from importlib import import_module
from typing import Any

from bridge.convert.systems import get_system
from bridge.errors import PayloadError
from bridge.precision.coercion import get_torch_dtype
from bridge.precision.mode import format_label
from bridge.read.foreign.reports import ExportReport
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import get_mixed_precision_config

FORMAT_FIELDS = frozenset({"fp8", "fp4", "autocast_enabled", "modules"})
"""Fields of a precision that decide the formats that a run computes in."""

log = logging.getLogger(__name__)


def export_to_trainer(
    name: str, recipe: str | MixedPrecisionConfig, **context: Any
) -> ExportReport:
    """Return the export of a recipe to a trainer.

    A warning is logged for each stated field for which the trainer has no exact setting.

    Args:
        name: Name of the trainer in the table of systems.
        recipe: A recipe, or its name.
        **context: Arguments of the exporter.

    Raises:
        PayloadError: The trainer cannot run the formats or the autocast of the recipe.
        PrecisionConfigError: The precision is wrong for any run.
        UnknownRecipeError: No recipe has this name.
    """
    config = get_mixed_precision_config(recipe)
    config.finalize()
    trainer = get_system(name)
    report = trainer.export(config, **context)
    refused = [entry for entry in report.unmapped if entry.field in FORMAT_FIELDS]
    if refused:
        lines = [f"{trainer.title} cannot run {format_label(config)}:"]
        for entry in refused:
            lines.append(f"  {entry}")
        raise PayloadError("\n".join(lines))
    for entry in report.unmapped:
        log.warning("%s: %s", trainer.title, entry)
    return report


def transformers_arguments(recipe: str | MixedPrecisionConfig) -> dict[str, Any]:
    """Return the arguments of transformers' `TrainingArguments`: `bf16`, `fp16` and `tf32`.

    Raises:
        PayloadError: The recipe needs FP8 or FP4. `TrainingArguments` has no argument for them.
    """
    payload: dict[str, Any] = export_to_trainer("huggingface", recipe).payload
    return payload


def nemo_plugin(recipe: str | MixedPrecisionConfig) -> Any:
    """Return NeMo 2's `MegatronMixedPrecision` for the `plugins` of its Trainer.

    Raises:
        ImportError: NeMo is not installed.
        PayloadError: NeMo 2 cannot run the formats or the autocast of the recipe.
    """
    payload = dict(export_to_trainer("nemo2", recipe).payload)
    module, _, class_name = payload.pop("_target_").rpartition(".")
    plugin_class = getattr(import_module(module), class_name)
    for argument, value in payload.items():
        if isinstance(value, str) and value.startswith("torch."):
            payload[argument] = get_torch_dtype(value.removeprefix("torch."))
    return plugin_class(**payload)
