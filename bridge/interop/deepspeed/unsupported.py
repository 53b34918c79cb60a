"""Settings of DeepSpeed that bear on precision and have no field: all are reported.

Blocks forbid names they do not know, the top of the file ignores them silently; both are reported. So is what
DeepSpeed has removed: it refuses a file that still has the block, switched on or off, where earlier releases read it.
Source: DeepSpeed 0.19.8 runtime/config.py, runtime/precision_config.py, runtime/zero/config.py, runtime/engine.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bridge.interop.optimizers import low_precision_optimizer
from bridge.interop.unsupported import report_row, rows

if TYPE_CHECKING:
    from bridge.interop.builders import ImportBuilder
    from bridge.interop.settings import Settings

__all__ = ["LOOKS_LIKE_PRECISION", "refuse_apex", "report_half", "report_unsupported"]

VERSION = "DeepSpeed 0.19.8"
STATE = "Write it down to be sure."
MASTERS = "Megatron keeps FP32 masters: plan 4 more bytes per weight, or use its precision-aware optimizer."
IGNORED = ("fp8", "fp4", "tf32", "float16", "fp32", "mixed_precision", "fp32_allreduce")
"""Names at the top that people write and nothing reads."""
READ = ("fp16", "bf16", "bfloat16", "torch_autocast", "data_types", "communication_data_type", "amp")
"""Names at the top that are accounted for elsewhere."""
HALF = {
    "fp16": {
        "auto_cast": ("inputs of the module are cast to FP16 by the engine", "Cast the inputs in the data loader."),
        "consecutive_hysteresis": (
            "refills on every good step; Megatron's tracker refills when the scale grows",
            "Lower hysteresis if the scale falls too late.",
        ),
        "fp16_master_weights_and_grads": ("no FP32 masters: FP16 throughout", MASTERS),
    },
    "bf16": {
        "immediate_grad_update": ("when gradients are copied, not how exactly", "Nothing to do."),
        "check_grad_overflow": ("Megatron checks BF16 gradients for NaN instead", "See check_for_nan_in_grad."),
        "bf16_master_weights_and_grads": ("no FP32 masters: BF16 throughout", MASTERS),
        "bf16_optimizer_states": ("no FP32 masters: BF16 throughout", MASTERS),
    },
}
"""Block -> what it says beyond on, off and the loss scale, which none of ours does."""
SCALE = ("enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "min_loss_scale", "hysteresis")
LOOKS_LIKE_PRECISION = re.compile(
    r"(^|_)(bf16|fp16|fp8|fp4|fp32|tf32|mxfp\d|nvfp4)(_|$)|float\d|precision|dtype|data_type"
)


def refuse_apex(builder: ImportBuilder, top: Settings) -> None:
    """Raise PayloadError for an `amp` block that is on; report one that is off, which is refused all the same."""
    block = top.values.get("amp")
    if block is None:
        return
    on = block.get("enabled", False) if isinstance(block, Mapping) else block
    if on not in (False, 0, "auto", "false", "False"):
        remedy = "Use an fp16, bf16 or torch_autocast block"
        raise top.wrong("amp", f"must not be there: {VERSION} removed Apex", block, remedy)
    detail = (
        f"Apex was removed: {VERSION} refuses a file that has the block, off as it is here; earlier releases ignore it"
    )
    builder.report("amp", block, "dead knob", detail, "Drop it.")


def report_half(builder: ImportBuilder, block: Settings, mode: str, *, on: bool) -> None:
    """Report what a block says beyond on, off and the loss scale."""
    for key in block.values:
        if not block.given(key) or (key in SCALE if mode == "fp16" else key == "enabled"):
            continue
        name = block.name(key)
        if key not in HALF[mode]:
            detail = f"no setting of the block: {VERSION} refuses the file, earlier releases ignore it"
            builder.report(name, block[key], "dead knob", detail, "Drop it, or check its spelling.")
            continue
        detail, remedy = HALF[mode][key]
        if block[key] == "auto":
            builder.report(name, "auto", "implied default", f"{VERSION} reads auto as its default", STATE)
        elif block.switch(key) is False and key != "check_grad_overflow":
            builder.map(name)
        elif on:
            builder.report(name, block.switch(key), "unsupported", detail, remedy)
        else:
            builder.report(name, block.switch(key), "dead knob", "its block is off", remedy)


def report_unsupported(builder: ImportBuilder, top: Settings) -> None:
    """Report everything else that bears on precision, and what looks as if it did and is ignored."""
    for key in top.values:
        if key in IGNORED or (
            key not in READ and LOOKS_LIKE_PRECISION.search(key.lower()) and not key.startswith("seq_")
        ):
            detail = f"{VERSION} ignores a block of this name without a word"
            builder.report(key, top[key], "dead knob", detail, "Drop it; FP8 comes through accelerate, not from here.")
    for path, row in (rows("deepspeed_removed") | rows("deepspeed") | rows("deepspeed_on")).items():
        value: Any = top.values
        for word in path.split("."):
            value = value.get(word) if isinstance(value, Mapping) else None
        is_off = path == "msamp" and isinstance(value, Mapping) and not value.get("enabled")
        if value == "auto":
            builder.report(path, value, "implied default", f"{VERSION} reads auto as its default, off", STATE)
        elif value is not None:
            report_row(builder, path, False if is_off else value, row)
    optimizer = top.values.get("optimizer")
    name = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    kept = low_precision_optimizer(name)
    if kept is not None:
        if "one bit" in kept:
            kept = f"{kept}; {VERSION} has removed such optimizers and fails on the name"
        remedy = "Megatron keeps the state in FP32 and reduces gradients in full."
        builder.report("optimizer.type", name, "unsupported", kept, remedy)
