"""The dtypes in which DeepSpeed accumulates and sends gradients: two settings, where Megatron has one switch.

Source: DeepSpeed 0.19.8 runtime/config.py (`DtypeEnum`, `get_communication_data_type`), runtime/engine.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bridge.precision.dtypes import SPELLINGS

if TYPE_CHECKING:
    from bridge.interop.builders import ImportBuilder
    from bridge.interop.settings import Settings

__all__ = ["DTYPE_NAMES", "import_gradients"]

VERSION = "DeepSpeed 0.19.8"
SENT = ("fp32", "fp16", "bf16")
"""Values of `communication_data_type`, in either case."""
DTYPE_NAMES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
}
"""Spelling of every other dtype -> ours. Case counts."""


def import_gradients(builder: ImportBuilder, top: Settings, mode: str | None) -> None:
    """Map the two settings that together decide in what gradients are accumulated and reduced."""
    types = top.section("data_types")
    accumulated, sent = _dtype(types, "grad_accum_dtype"), _sent(builder, top, "communication_data_type")
    names = {types.name("grad_accum_dtype"): accumulated, "communication_data_type": sent}
    if mode is None:
        for name, value in names.items():
            if value == "fp32":
                builder.map(name)
            elif value is not None:
                detail = f"gradients of FP32 weights are accumulated or sent in {value}; Megatron keeps them in FP32"
                builder.report(name, value, "unsupported", detail, "Drop it, or train in half precision.")
    else:
        in_fp32 = {name: (value or mode) == "fp32" for name, value in names.items()}
        builder.fields["grad_reduce_in_fp32"] = all(in_fp32.values())
        for name, value in names.items():
            if value is None:
                detail = f"{VERSION} uses the model's dtype, so gradients are kept or sent in {mode}"
                builder.report(name, mode, "implied default", detail, "Say fp32 in both places for FP32 reduction.")
            elif len(set(in_fp32.values())) > 1 or value not in (mode, "fp32"):
                detail = "gradients are accumulated in one dtype and sent in another; Megatron has one switch for both"
                builder.report(name, value, "approximated", detail, "State grad_reduce_in_fp32 as you want it.")
            else:
                builder.map(name, grad_reduce_in_fp32=in_fp32[name])
        if accumulated not in (None, mode) and not _stage(top):
            detail = f"{VERSION} raises on it without ZeRO, whose stage is 0 here"
            remedy = "Set zero_optimization.stage to 1 or more."
            builder.report(types.name("grad_accum_dtype"), accumulated, "unsupported", detail, remedy)
    _module_dtypes(builder, types, mode)
    by_sequence = _sent(builder, top, "seq_parallel_communication_data_type")
    if by_sequence == "fp32":
        builder.map("seq_parallel_communication_data_type")
    elif by_sequence is not None:
        detail = "gradients of sequence-parallel ranks are reduced in it"
        builder.report("seq_parallel_communication_data_type", by_sequence, "unsupported", detail, "Check it by hand.")


def _stage(top: Settings) -> object:
    zero = top.values.get("zero_optimization")
    return zero.get("stage") if isinstance(zero, Mapping) else zero


def _dtype(types: Settings, key: str) -> str | None:
    value = types.text(key)
    if value is None:
        return None
    if value not in DTYPE_NAMES:
        remedy = f"Write '{SPELLINGS[value.lower()]}'" if value.lower() in SPELLINGS else "Use 'fp32' or 'bf16'"
        raise types.wrong(key, "must be fp32, fp16, bf16 or their torch names, letter by letter", value, remedy)
    return DTYPE_NAMES[value]


def _sent(builder: ImportBuilder, top: Settings, key: str) -> str | None:
    """Return the dtype that gradients are communicated in."""
    value = top.text(key)
    if value is None or value.lower() in SENT:
        return value and value.lower()
    if value.lower() == "bfp16":
        detail = f"what earlier releases called bf16, and {VERSION} refuses; bf16 was read"
        builder.report(key, value, "approximated", detail, "Write bf16.")
        return "bf16"
    known = SPELLINGS.get(value.lower().removeprefix("torch."))
    remedy = f"Write '{known}'" if known in SENT else "Use 'fp32'"
    raise top.wrong(key, f"must be {', '.join(SENT)}", value, remedy)


def _module_dtypes(builder: ImportBuilder, types: Settings, mode: str | None) -> None:
    for key in ("param_dtype", "buffer_dtype", "keep_in_fp32_modules"):
        if not types.given(key):
            continue
        if key == "param_dtype":
            if _dtype(types, key) != (mode or "fp32"):
                remedy = "Make it agree with the enabled block, or drop it"
                raise types.wrong(key, f"must be the dtype of the mode, {mode or 'fp32'}", types[key], remedy)
            builder.map(types.name(key), **({"params_dtype": mode} if mode else {}))
        else:
            builder.report(
                types.name(key), types[key], "unsupported", "no such choice in Megatron", "Check these by hand."
            )
