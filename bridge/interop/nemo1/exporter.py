"""A recipe as the precision part of a NeMo 1.x configuration, every default that moved between releases written out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.interop.amp import export_as_amp
from bridge.interop.builders import DELAYED, ExportBuilder, semantics_of
from bridge.interop.meaning import meaning
from bridge.interop.nemo1.fp8 import PLAIN
from bridge.precision.fields import LAYER_COUNTS

if TYPE_CHECKING:
    from bridge.interop.contract import ExportReport
    from bridge.registry.config import MixedPrecisionConfig

__all__ = ["SCALER", "TITLE", "export"]

TITLE = "NeMo 1.x"

BY_NAME = (*(key for key in PLAIN if key != "fp8_recipe"), *LAYER_COUNTS)
"""Keys of the model section that reach Megatron Core's TransformerConfig because they are called like its fields."""
SCALER = {
    "native_amp_init_scale": ("initial_loss_scale", 2**32),
    "native_amp_growth_interval": ("loss_scale_window", 1000),
    "hysteresis": ("hysteresis", 2),
}
"""Key of the model section -> field, and the default."""
PRECISION = {"fp32": 32, "fp16": 16, "bf16": "bf16"}


def export(config: MixedPrecisionConfig) -> ExportReport:
    """Return the precision's part of a NeMo 1.x configuration, every default written out."""
    builder = ExportBuilder(config, TITLE)
    acting = meaning(config)
    model: dict[str, Any] = {}
    dtype = _mode(builder, model)
    _fp8(builder, model, acting)
    _loss_scale(builder, model, acting, dtype)
    if model["megatron_amp_O2"]:
        model["optim"] = {"grad_sync_dtype": "fp32" if config.grad_reduce_in_fp32 else dtype}
        builder.map("grad_reduce_in_fp32", "model.optim.grad_sync_dtype")
    if config.fp4:
        for field in ("fp4", "fp4_recipe", "first_last_layers_bf16"):
            builder.report_if_stated(field, "unsupported", f"{TITLE} has no FP4", "Use NeMo 2 or Megatron Bridge.")
    return builder.finish({"trainer": {"precision": PRECISION[dtype]}, "model": model})


def _mode(builder: ExportBuilder, model: dict[str, Any]) -> str:
    """Write precision and O1 or O2; return the dtype."""
    mode = builder.config.mode
    if semantics_of(builder.config) != "megatron_o2":
        model["megatron_amp_O2"] = False
        dtype = export_as_amp(builder, "trainer.precision", "model.megatron_amp_O2")
        if builder.values["pipeline_dtype"] in (None, mode):
            builder.map("pipeline_dtype", "trainer.precision")
        return dtype
    model["megatron_amp_O2"] = True
    builder.map(mode, "trainer.precision", "model.megatron_amp_O2")
    for field in ("params_dtype", "pipeline_dtype"):
        if builder.values[field] in (None, mode):
            builder.map(field, "trainer.precision")
        else:
            remedy = "Use O1 (megatron_amp_O2: False) for FP32 weights."
            builder.report(field, "unsupported", f"O2 makes it {mode}", remedy)
    if builder.config.autocast_enabled:
        for field in ("autocast_enabled", "autocast_dtype"):
            detail = f"{builder.system} runs autocast over FP32 weights only"
            builder.report_if_stated(field, "unsupported", detail, "State params_dtype='fp32' for O1.")
    return mode


def _fp8(builder: ExportBuilder, model: dict[str, Any], acting: dict[str, Any]) -> None:
    chosen = builder.values["fp8"]
    model |= {"transformer_engine": True} if chosen else {}
    model |= {"fp8": chosen is not None, "fp8_e4m3": chosen == "e4m3", "fp8_hybrid": chosen == "hybrid"}
    if not chosen:
        return
    builder.map("fp8", "model.transformer_engine", "model.fp8", "model.fp8_e4m3", "model.fp8_hybrid")
    if acting["fp8_recipe"] == "delayed":
        builder.map("fp8_recipe")
    else:
        model["fp8_recipe"] = acting["fp8_recipe"]
        builder.map("fp8_recipe", "model.fp8_recipe")
    for field in DELAYED:
        if field in acting:
            model[field] = acting[field]
            builder.map(field, f"model.{field}")
    for field in BY_NAME:
        if field in acting and acting[field] != (field == "fp8_wgrad"):
            model[field] = acting[field]
            builder.map(field, f"model.{field}")
    if acting["fp8_param_gather"]:
        model["fp8_params"] = True
        for field in ("fp8_param", "fp8_param_gather"):
            if acting["fp8_recipe"] == "delayed":
                builder.map(field, "model.fp8_params")
            else:
                detail = "fp8_params initialises weights for delayed scaling, whatever the scheme"
                builder.report_if_stated(field, "semantics", detail, "State fp8_param_gather=False for NeMo 1.x.")


def _loss_scale(builder: ExportBuilder, model: dict[str, Any], acting: dict[str, Any], dtype: str) -> None:
    if builder.values["loss_scale"]:
        detail = f"{builder.system} scales dynamically and only so"
        builder.report("loss_scale", "unsupported", detail, "Use a dynamic loss scale.")
    if dtype != "fp16":
        return
    for key, (field, _) in SCALER.items():
        if field in acting:
            model[key] = acting[field]
            builder.map(field, f"model.{key}")
    if acting.get("min_loss_scale", 1.0) != 1.0:
        builder.report("min_loss_scale", "unsupported", "its scaler has no floor", "Do without a floor.")
