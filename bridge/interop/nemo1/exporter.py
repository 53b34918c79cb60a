"""A recipe as a NeMo 1.x configuration, every default written out."""

from typing import Any

from bridge.interop.builders import ExportBuilder
from bridge.interop.contract import ExportReport
from bridge.interop.meaning import meaning, semantics_of
from bridge.interop.nemo1.file import TABLE
from bridge.interop.pytorch.amp import export_as_amp
from bridge.registry.config import MixedPrecisionConfig

WORDS = {"fp32": 32, "fp16": 16, "bf16": "bf16"}


def export(config: MixedPrecisionConfig) -> ExportReport:
    """Return the precision's part of a NeMo 1.x configuration, every default written out."""
    builder = ExportBuilder(config, TABLE.title)
    acting, is_o2 = meaning(config), semantics_of(config) == "megatron_o2"
    model: dict[str, Any] = {"megatron_amp_O2": is_o2}
    dtype = _mode(builder, is_o2=is_o2)
    _fp8(builder, model, acting)
    if config.loss_scale:
        builder.record("nemo1.nemo-x-scales", "loss_scale")
    if dtype == "fp16":
        model |= TABLE.write(builder, "scaler", "model", acting)
        if acting.get("min_loss_scale", 1.0) != 1.0:
            builder.record("nemo1.its-scaler-has-no-floor", "min_loss_scale")
    if is_o2:
        model["optim"] = {"grad_sync_dtype": "fp32" if config.grad_reduce_in_fp32 else dtype}
        builder.map("grad_reduce_in_fp32", "model.optim.grad_sync_dtype")
    if config.fp4:
        builder.record_if_stated("nemo1.nemo-x-has", ("fp4", "fp4_recipe", "first_last_layers_bf16"))
    return builder.finish({"trainer": {"precision": WORDS[dtype]}, "model": model})


def _mode(builder: ExportBuilder, *, is_o2: bool) -> str:
    mode, settings = builder.config.mode, ("trainer.precision", "model.megatron_amp_O2")
    if not is_o2:
        builder.map_dtype("pipeline_dtype", settings[0])
        return export_as_amp(builder, *settings)
    builder.map(mode, *settings)
    for field in ("params_dtype", "pipeline_dtype"):
        if not builder.map_dtype(field, settings[0]):
            builder.record("nemo1.o2-makes-it", field, mode=mode)
    if builder.config.autocast_enabled:
        builder.record_if_stated("nemo1.nemo-x-runs", ("autocast_enabled", "autocast_dtype"))
    return mode


def _fp8(builder: ExportBuilder, model: dict[str, Any], acting: dict[str, Any]) -> None:
    chosen = builder.values["fp8"]
    model |= {"transformer_engine": True} if chosen else {}
    model |= {"fp8": chosen is not None, "fp8_e4m3": chosen == "e4m3", "fp8_hybrid": chosen == "hybrid"}
    if not chosen:
        return
    builder.map("fp8", "model.transformer_engine", "model.fp8", "model.fp8_e4m3", "model.fp8_hybrid")
    builder.map("fp8_recipe")
    model |= TABLE.write(builder, "fp8", "model", acting)
    if acting["fp8_param_gather"]:
        for field in ("fp8_param", "fp8_param_gather"):
            if acting["fp8_recipe"] == "delayed":
                builder.map(field, "model.fp8_params")
            else:
                builder.record_if_stated("nemo1.fp8_params-initialises-weights", field)
