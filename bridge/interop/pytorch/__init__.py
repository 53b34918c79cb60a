"""Plain PyTorch's own pieces: autocast and the scaler, FSDP policies, torchao.

The functions that make PyTorch's objects of a recipe stand in `bridge.pytorch`, and can be imported from here too.
"""

from bridge.pytorch import (
    apply_tf32,
    autocast_for,
    emulate_linears,
    float8_linear_config_for,
    fsdp_policy_for,
    grad_scaler_for,
)

__all__ = [
    "apply_tf32",
    "autocast_for",
    "emulate_linears",
    "float8_linear_config_for",
    "fsdp_policy_for",
    "grad_scaler_for",
]
