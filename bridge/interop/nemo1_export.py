"""A recipe as the precision part of a NeMo 1.x configuration, every default that moved between releases written out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.interop.amp import depart_as_amp
from bridge.interop.crossing import Outward
from bridge.interop.ledger import semantics_of
from bridge.interop.meaning import meaning

if TYPE_CHECKING:
    from bridge.interop.contract import Exported
    from bridge.registry.config import MixedPrecisionConfig

__all__ = ["exported"]

BY_NAME = (
    "fp8_wgrad",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
)
"""Keys of the model section that reach Megatron Core's TransformerConfig because they are called like its fields."""
DELAYED = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
SCALER = {
    "initial_loss_scale": "native_amp_init_scale",
    "loss_scale_window": "native_amp_growth_interval",
    "hysteresis": "hysteresis",
}
PRECISION = {"fp32": 32, "fp16": 16, "bf16": "bf16"}


def exported(config: MixedPrecisionConfig, system: str) -> Exported:
    """Return the payload, and what NeMo 1.x cannot say."""
    book = Outward(config, system)
    acting = meaning(config)
    model: dict[str, Any] = {}
    dtype = _mode(book, model)
    _fp8(book, model, acting)
    _loss_scale(book, model, acting, dtype)
    if model["megatron_amp_O2"]:
        model["optim"] = {"grad_sync_dtype": "fp32" if config.grad_reduce_in_fp32 else dtype}
        book.write("grad_reduce_in_fp32", "model.optim.grad_sync_dtype")
    if config.fp4:
        for field in ("fp4", "fp4_recipe", "first_last_layers_bf16"):
            book.lose_if_stated(field, "unsupported", f"{system} has no FP4", "Use NeMo 2 or Megatron Bridge.")
    return book.exported({"trainer": {"precision": PRECISION[dtype]}, "model": model})


def _mode(book: Outward, model: dict[str, Any]) -> str:
    """Write precision and O1 or O2; return the dtype."""
    mode = book.config.mode
    if semantics_of(book.config) != "megatron_o2":
        model["megatron_amp_O2"] = False
        dtype = depart_as_amp(book, "trainer.precision", "model.megatron_amp_O2")
        if book.values["pipeline_dtype"] in (None, mode):
            book.write("pipeline_dtype", "trainer.precision")
        return dtype
    model["megatron_amp_O2"] = True
    book.write(mode, "trainer.precision", "model.megatron_amp_O2")
    for field in ("params_dtype", "pipeline_dtype"):
        if book.values[field] in (None, mode):
            book.write(field, "trainer.precision")
        else:
            remedy = "Use O1 (megatron_amp_O2: False) for FP32 weights."
            book.lose(field, "unsupported", f"O2 makes it {mode}", remedy)
    if book.config.autocast_enabled:
        for field in ("autocast_enabled", "autocast_dtype"):
            detail = f"{book.system} runs autocast over FP32 weights only"
            book.lose_if_stated(field, "unsupported", detail, "State params_dtype='fp32' for O1.")
    return mode


def _fp8(book: Outward, model: dict[str, Any], acting: dict[str, Any]) -> None:
    chosen = book.values["fp8"]
    model |= {"transformer_engine": True} if chosen else {}
    model |= {"fp8": chosen is not None, "fp8_e4m3": chosen == "e4m3", "fp8_hybrid": chosen == "hybrid"}
    if not chosen:
        return
    book.write("fp8", "model.transformer_engine", "model.fp8", "model.fp8_e4m3", "model.fp8_hybrid")
    if acting["fp8_recipe"] == "delayed":
        book.write("fp8_recipe")
    else:
        model["fp8_recipe"] = acting["fp8_recipe"]
        book.write("fp8_recipe", "model.fp8_recipe")
    for field in DELAYED:
        if field in acting:
            model[field] = acting[field]
            book.write(field, f"model.{field}")
    for field in BY_NAME:
        if field in acting and acting[field] != (field == "fp8_wgrad"):
            model[field] = acting[field]
            book.write(field, f"model.{field}")
    if acting["fp8_param_gather"]:
        model["fp8_params"] = True
        for field in ("fp8_param", "fp8_param_gather"):
            if acting["fp8_recipe"] == "delayed":
                book.write(field, "model.fp8_params")
            else:
                detail = "fp8_params initialises weights for delayed scaling, whatever the scheme"
                book.lose_if_stated(field, "semantics", detail, "State fp8_param_gather=False for NeMo 1.x.")


def _loss_scale(book: Outward, model: dict[str, Any], acting: dict[str, Any], dtype: str) -> None:
    if book.values["loss_scale"]:
        detail = f"{book.system} scales dynamically and only so"
        book.lose("loss_scale", "unsupported", detail, "Use a dynamic loss scale.")
    if dtype != "fp16":
        return
    for field, key in SCALER.items():
        if field in acting:
            model[key] = acting[field]
            book.write(field, f"model.{key}")
    if acting.get("min_loss_scale", 1.0) != 1.0:
        book.lose("min_loss_scale", "unsupported", "its scaler has no floor", "Do without a floor.")
