"""Autocast over FP32 weights, the "mixed precision" of most trainers, and Megatron's modes converted to it.

BF16   fp32=True, autocast_enabled=True, autocast_dtype="bf16": the recipe `bf16_autocast_mixed`
FP16   fp16=True too, with params_dtype="fp32": only the `fp16` switch has a loss scale
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.interop.meaning import semantics_of, unread_fields

if TYPE_CHECKING:
    from bridge.interop.builders import ExportBuilder


def amp_fields(compute: str) -> dict[str, object]:
    """Return the fields of autocast to `compute` over FP32 weights; of plain FP32 where that is "fp32"."""
    if compute == "fp32":
        return {"fp32": True}
    mode: dict[str, object] = {"fp32": True} if compute == "bf16" else {"fp16": True, "params_dtype": "fp32"}
    return mode | {"autocast_enabled": True, "autocast_dtype": compute}


def export_as_amp(builder: ExportBuilder, *settings: str) -> str:
    """Note the mode fields as autocast over FP32 weights, and return the compute it casts to; "fp32" for none.

    Args:
        builder: The builder of the export.
        settings: What is written for it.
    """
    config, mode, semantics = builder.config, builder.config.mode, semantics_of(builder.config)
    if semantics == "fp32":
        builder.map("fp32", *settings)
        if builder.values["params_dtype"] in (None, "fp32"):
            builder.map("params_dtype", *settings)
        return "fp32"
    if semantics == "amp_o1":
        compute: str = builder.values["autocast_dtype"] or mode
        builder.exported_mode = "fp16" if compute == "fp16" else "fp32"
        for field in ("autocast_enabled", "autocast_dtype", "params_dtype"):
            builder.map(field, *settings)
        if config.fp32:
            builder.map("fp32", *settings)
        if config.fp16 and compute == "fp16":
            builder.map("fp16", *settings)
        elif mode != "fp32":
            detail = f"{builder.system} casts FP32 weights per operator, and has no {mode} weights"
            builder.report(mode, "semantics", detail, "State fp32=True with BF16 autocast, which is the same.")
        if config.grad_reduce_in_fp32:
            builder.map("grad_reduce_in_fp32")
        return compute
    builder.exported_mode = "fp16" if mode == "fp16" else "fp32"
    megatron = f"Megatron trains {mode} weights with FP32 masters"
    detail = f"{builder.system} keeps FP32 weights and casts each operator; {megatron}"
    remedy = "Nothing to do if AMP is welcome: it needs more memory and rounds later."
    for field in (mode, "params_dtype", "autocast_enabled", "autocast_dtype"):
        if field == mode or (field in config.stated and field not in unread_fields(config)):
            builder.report(field, "semantics", detail, remedy)
    if config.grad_reduce_in_fp32:
        builder.map("grad_reduce_in_fp32")
    else:
        builder.report_if_stated("grad_reduce_in_fp32", "semantics", "gradients of FP32 weights are FP32", remedy)
    return mode
