"""Autocast and TF32 of a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.errors import PrecisionTypeError
from bridge.precision.dtypes import torch_dtype
from bridge.registry.config import MixedPrecisionConfig

if TYPE_CHECKING:
    import torch

__all__ = ["apply_tf32", "autocast_for", "checked", "compute_dtype", "device_type", "require_config"]


def autocast_for(config: MixedPrecisionConfig, device: str | torch.device | None = None) -> torch.autocast:
    """Return the autocast context of a recipe: its half precision over FP32 weights, switched off for FP32.

    Args:
        config: The recipe.
        device: Where the model is; None: CUDA where there is a device, else the CPU.
    """
    import torch

    compute = compute_dtype(checked(config))
    enabled = compute != "fp32"
    return torch.autocast(device_type(device), dtype=torch_dtype(compute) if enabled else None, enabled=enabled)


def apply_tf32(config: MixedPrecisionConfig) -> str | None:
    """Allow or forbid TF32 in FP32 matmuls for this process, as the recipe states.

    Returns:
        What float32 matmuls now use: "tf32" or "ieee"; None where the recipe leaves it to the process.

    It goes through `torch.set_float32_matmul_precision`, the one switch after which both of PyTorch's interfaces, old
    and new, can still be read, and for convolutions through `torch.backends.cudnn.allow_tf32`.
    """
    import torch

    require_config(config)
    if config.tf32 is None:
        return None
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = config.tf32
    return "tf32" if config.tf32 else "ieee"


def compute_dtype(config: MixedPrecisionConfig) -> str:
    """Return the dtype that operators compute in: that of autocast over FP32 weights, else the mode. Needs no torch."""
    values = config.to_dict(full=True)
    if config.autocast_enabled and (values["params_dtype"] or config.mode) == "fp32":
        return str(values["autocast_dtype"] or config.mode)
    return config.mode


def checked(config: object) -> MixedPrecisionConfig:
    """Return the recipe; PrecisionTypeError for anything else, PrecisionConfigError for one that can never be right."""
    recipe = require_config(config)
    recipe.finalize()
    return recipe


def require_config(config: object) -> MixedPrecisionConfig:
    """Return the recipe; PrecisionTypeError for anything else."""
    if not isinstance(config, MixedPrecisionConfig):
        raise PrecisionTypeError(
            f"mixed_precision: must be a MixedPrecisionConfig, got {config!r:.80}. "
            "get_mixed_precision_config makes one of a recipe's name."
        )
    return config


def device_type(device: str | torch.device | None) -> str:
    """Return "cuda" or "cpu" for a device; None: CUDA where there is a device."""
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device).type
