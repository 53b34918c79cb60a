"""A recipe as the precision blocks of a DeepSpeed configuration.

FP32 accumulation takes ZeRO: the engine refuses gradients in another dtype than the model's without it, and at stage 1
has an optimizer of its own for BF16 weights and FP32 gradients.
Source: DeepSpeed 0.19.8 runtime/engine.py (`_do_optimizer_sanity_check`), runtime/bf16_optimizer.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from bridge.interop.amp import export_as_amp
from bridge.interop.builders import ExportBuilder, semantics_of
from bridge.interop.scaler import report_scaler
from bridge.precision.dtypes import TORCH_NAMES

if TYPE_CHECKING:
    from bridge.interop.contract import ExportReport
    from bridge.registry.config import MixedPrecisionConfig

__all__ = ["export"]

TITLE = "DeepSpeed"
SHARDED = (
    "DeepSpeed 0.19.8 raises on FP32 accumulation of half-precision gradients without ZeRO, so zero_optimization.stage="
    "1 was written: optimizer state is sharded as under Megatron's distributed optimizer, and the numbers do not change"
)


def export(config: MixedPrecisionConfig) -> ExportReport:
    """Return a DeepSpeed configuration's precision blocks."""
    builder = ExportBuilder(config, TITLE)
    mode, semantics = config.mode, semantics_of(config)
    payload: dict[str, Any] = {
        "fp16": {"enabled": config.fp16 and semantics != "amp_o1"},
        "bf16": {"enabled": config.bf16 and semantics != "amp_o1"},
    }
    if semantics == "amp_o1":
        _export_autocast(builder, payload)
    else:
        builder.map(mode, *(("fp16.enabled", "bf16.enabled") if mode == "fp32" else (f"{mode}.enabled",)))
        if builder.values["params_dtype"] in (None, mode):
            builder.map("params_dtype", f"{mode}.enabled")
        else:
            detail = f"the engine casts every weight to {mode} and keeps its own FP32 masters"
            builder.report("params_dtype", "semantics", detail, "Nothing to do: the masters are there all the same.")
    if mode != "fp32" and semantics != "amp_o1":
        dtype = "fp32" if config.grad_reduce_in_fp32 else mode
        payload |= {"data_types": {"grad_accum_dtype": dtype}, "communication_data_type": dtype}
        builder.map("grad_reduce_in_fp32", "data_types.grad_accum_dtype", "communication_data_type")
        if dtype != mode:
            payload["zero_optimization"] = {"stage": 1}
            builder.report(
                "grad_reduce_in_fp32", "approximated", SHARDED, "Raise the stage, or reduce in half precision."
            )
    elif mode == "fp32" and semantics == "fp32" and config.grad_reduce_in_fp32:
        builder.map("grad_reduce_in_fp32")
    if config.fp16 and semantics != "amp_o1":
        _export_loss_scale(builder, payload["fp16"])
    return builder.finish(payload)


def _export_autocast(builder: ExportBuilder, payload: dict[str, Any]) -> None:
    compute = export_as_amp(builder, "torch_autocast.enabled", "torch_autocast.dtype")
    payload["torch_autocast"] = {"enabled": True, "dtype": TORCH_NAMES[compute]}
    report_scaler(builder, f"{TITLE} under torch_autocast")
    if builder.config.grad_reduce_in_fp32:
        detail = "gradients of the cast modules are communicated in the autocast dtype"
        remedy = "Use the bf16 block with FP32 reduction."
        builder.report_if_stated("grad_reduce_in_fp32", "unsupported", detail, remedy)


def _export_loss_scale(builder: ExportBuilder, block: dict[str, Any]) -> None:
    config = builder.config
    if config.loss_scale is not None:
        block["loss_scale"] = config.loss_scale
        builder.map("loss_scale", "fp16.loss_scale")
        return
    block["loss_scale"] = 0
    builder.map("loss_scale", "fp16.loss_scale")
    initial = config.initial_loss_scale or 65536
    mantissa, exponent = math.frexp(initial)
    block["initial_scale_power"] = max(exponent - 1, 0)
    if mantissa == 0.5 and exponent >= 1:
        builder.map("initial_loss_scale", "fp16.initial_scale_power")
    else:
        detail = "only whole powers of two, from 1 up; the next lower one was written"
        builder.report("initial_loss_scale", "approximated", detail, "The scale finds its value in the first steps.")
    for field in ("min_loss_scale", "loss_scale_window"):
        value = builder.values[field]
        block[field] = max(int(value), 1)
        if block[field] == value:
            builder.map(field, f"fp16.{field}")
        else:
            builder.report(field, "approximated", "whole numbers from 1 up only", f"Expect {block[field]} instead.")
    block["hysteresis"] = config.hysteresis
    builder.map("hysteresis", "fp16.hysteresis")
