"""Functions that use a recipe in a plain PyTorch loop, and record a live model.

    config = get_mixed_precision_config("fp16_mixed")
    apply_tf32(config)
    scaler = grad_scaler_for(config)
    with autocast_for(config):
        loss = model(x)
    scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()

Weights stay in FP32, and autocast casts per operator, so that no separate masters are needed. torch
is imported when a function of this room is called.

    loop.py               autocast, loss scaler, FSDP policy and TF32 of a recipe
    loss_scaler.py        `LossScaler`: Megatron's rule for the loss scale, in torch's `GradScaler`
    linear_schemes.py     name of each `nn.Linear` -> scheme and format, by the rows of `modules`
    float8.py             these layers converted by torchao, or replaced by emulated layers
    emulated_linear.py    `EmulatedLinear` over `bridge.runtime.numerics`
    check_precision.py    `PrecisionReport`: dtypes of a model, its optimizer and a step
    live_audit.py         `StepAudit`: a step against a plan, or the layers that ran in FP8 or FP4
    record/               `GemmWatch`: the rows of an audit's record, from every GEMM that runs

Runs of Megatron record with `record/` too.
"""

from bridge.runtime.pytorch.check_precision import PrecisionReport, check_precision
from bridge.runtime.pytorch.float8 import convert_linears, emulate_linears, float8_linear_config_for
from bridge.runtime.pytorch.linear_schemes import linear_schemes
from bridge.runtime.pytorch.live_audit import StepAudit, assert_effective, audit
from bridge.runtime.pytorch.loop import apply_tf32, autocast_for, fsdp_policy_for, grad_scaler_for

__all__ = [
    "PrecisionReport",
    "StepAudit",
    "apply_tf32",
    "assert_effective",
    "audit",
    "autocast_for",
    "check_precision",
    "convert_linears",
    "emulate_linears",
    "float8_linear_config_for",
    "fsdp_policy_for",
    "grad_scaler_for",
    "linear_schemes",
]
