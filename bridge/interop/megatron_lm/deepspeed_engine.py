"""Megatron-LM under DeepSpeed, whose engine scales the loss and reduces gradients as its own file says.

Source: Megatron-DeepSpeed megatron/optimizer/__init__.py, which returns the bare optimizer to the engine and leaves the
arguments of its own scaler unread.
"""

from bridge.interop.builders import ImportBuilder
from bridge.interop.megatron_lm.arguments import Arguments
from bridge.interop.megatron_lm.flags import OTHER_SETTINGS
from bridge.rules.inert import SCALER_SCHEDULE

FILE = "deepspeed_config"
SCALER = ("loss_scale", *SCALER_SCHEDULE)
REDUCTION = ("accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16")
OWNED = (FILE, *SCALER, *REDUCTION)
"""Settings of Megatron-LM's that the engine decides instead."""


def is_engine(run: Arguments) -> bool:
    """Return whether a run trains with DeepSpeed's engine."""
    return "deepspeed" in run or FILE in run.settings


def cross(run: Arguments, builder: ImportBuilder) -> None:
    """Report the arguments that have no effect under the engine, and what decides instead."""
    for key in (*SCALER, *REDUCTION):
        written = run.settings.get(key)
        if written is not None and written.value is not False:
            does = "scales the loss" if key in SCALER else "reduces gradients"
            builder.record("megatron_deepspeed.under-deepspeed-the-engine", written.name, written.shown, does=does)
    option = run.settings.get(FILE)
    if option is None:
        builder.record("megatron_deepspeed.the-engine-scales-the-loss", "--deepspeed", True)
    else:
        builder.report(option.name, option.shown, *OTHER_SETTINGS[FILE].record)
