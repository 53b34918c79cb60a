"""A recipe as the precision part of a NeMo 1.x configuration, every default that moved between releases written out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.interop.amp import export_as_amp
from bridge.interop.builders import DELAYED, ExportBuilder, semantics_of
from bridge.interop.meaning import meaning
from bridge.precision.fields import LAYER_COUNTS

if TYPE_CHECKING:
    from bridge.interop.contract import ExportReport
    from bridge.registry.config import MixedPrecisionConfig

__all__ = ["PLAIN", "SCALER", "TITLE", "export"]

TITLE = "NeMo 1.x"
PLAIN = ("fp8_recipe", "fp8_wgrad", "fp8_dot_product_attention", "fp8_multi_head_attention", "first_last_layers_bf16")
"""Keys of the model section that reach Megatron Core's TransformerConfig because they are called like its fields."""
SCALER = {
    "native_amp_init_scale": ("initial_loss_scale", 2**32),
    "native_amp_growth_interval": ("loss_scale_window", 1000),
    "hysteresis": ("hysteresis", 2),
}
"""Key of the model section -> field, and the default."""
USUAL = {"fp8_recipe": "delayed", "fp8_wgrad": True}
"""Field of `PLAIN` -> the value that need not be written; elsewhere false."""


def export(config: MixedPrecisionConfig) -> ExportReport:
    """Return the precision's part of a NeMo 1.x configuration, every default written out."""
    builder = ExportBuilder(config, TITLE)
    acting = meaning(config)
    model: dict[str, Any] = {"megatron_amp_O2": semantics_of(config) == "megatron_o2"}
    dtype = _mode(builder, is_o2=model["megatron_amp_O2"])
    _fp8(builder, model, acting)
    if config.loss_scale:
        detail = f"{TITLE} scales dynamically and only so"
        builder.report("loss_scale", "unsupported", detail, "Use a dynamic loss scale.")
    for key, (field, _) in SCALER.items():
        if dtype == "fp16" and field in acting:
            model[key] = acting[field]
            builder.map(field, f"model.{key}")
    if dtype == "fp16" and acting.get("min_loss_scale", 1.0) != 1.0:
        builder.report("min_loss_scale", "unsupported", "its scaler has no floor", "Do without a floor.")
    if model["megatron_amp_O2"]:
        model["optim"] = {"grad_sync_dtype": "fp32" if config.grad_reduce_in_fp32 else dtype}
        builder.map("grad_reduce_in_fp32", "model.optim.grad_sync_dtype")
    if config.fp4:
        fields = ("fp4", "fp4_recipe", "first_last_layers_bf16")
        builder.report_if_stated(fields, "unsupported", f"{TITLE} has no FP4", "Use NeMo 2 or Megatron Bridge.")
    precision = {"fp32": 32, "fp16": 16, "bf16": "bf16"}[dtype]
    return builder.finish({"trainer": {"precision": precision}, "model": model})


def _mode(builder: ExportBuilder, *, is_o2: bool) -> str:
    """Map the mode to precision and O1 or O2; return the dtype."""
    mode = builder.config.mode
    dtype = mode if is_o2 else export_as_amp(builder, "trainer.precision", "model.megatron_amp_O2")
    if is_o2:
        builder.map(mode, "trainer.precision", "model.megatron_amp_O2")
    for field in ("params_dtype", "pipeline_dtype") if is_o2 else ("pipeline_dtype",):
        if builder.values[field] in (None, mode):
            builder.map(field, "trainer.precision")
        elif is_o2:
            remedy = "Use O1 (megatron_amp_O2: False) for FP32 weights."
            builder.report(field, "unsupported", f"O2 makes it {mode}", remedy)
    if is_o2 and builder.config.autocast_enabled:
        detail = f"{TITLE} runs autocast over FP32 weights only"
        fields = ("autocast_enabled", "autocast_dtype")
        builder.report_if_stated(fields, "unsupported", detail, "State params_dtype='fp32' for O1.")
    return dtype


def _fp8(builder: ExportBuilder, model: dict[str, Any], acting: dict[str, Any]) -> None:
    chosen = builder.values["fp8"]
    model |= {"transformer_engine": True} if chosen else {}
    model |= {"fp8": chosen is not None, "fp8_e4m3": chosen == "e4m3", "fp8_hybrid": chosen == "hybrid"}
    if not chosen:
        return
    builder.map("fp8", "model.transformer_engine", "model.fp8", "model.fp8_e4m3", "model.fp8_hybrid")
    builder.map("fp8_recipe")
    for field in (*DELAYED, *PLAIN, *LAYER_COUNTS):
        if field in acting and (field in DELAYED or acting[field] != USUAL.get(field, False)):
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
