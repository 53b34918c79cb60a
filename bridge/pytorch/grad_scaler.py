"""The loss scaler of a recipe, as arguments and as an object."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from bridge.pytorch.autocast import checked, device_type

if TYPE_CHECKING:
    import torch

    from bridge.registry.config import MixedPrecisionConfig

__all__ = ["SCALE_FIELDS", "grad_scaler_for", "scaler_settings"]

SCALE_FIELDS = MappingProxyType(
    {
        "init_scale": "initial_loss_scale",
        "growth_interval": "loss_scale_window",
        "hysteresis": "hysteresis",
        "min_scale": "min_loss_scale",
    }
)
"""Argument of `LossScaler` -> field."""


def grad_scaler_for(config: MixedPrecisionConfig, device: str | torch.device | None = None) -> torch.amp.GradScaler:
    """Return the loss scaler of a recipe, with Megatron's rule; one that does nothing where nothing is to be scaled.

    Args:
        config: The recipe. FP16 scales dynamically unless `loss_scale` is stated; BF16 and FP32 only then.
        device: As for `autocast_for`. On a CPU, too, the scale is real.
    """
    import torch

    from bridge.pytorch.loss_scaler import LossScaler

    given = scaler_settings(checked(config))
    if not given.pop("enabled"):
        return torch.amp.GradScaler(device_type(device), enabled=False)
    return LossScaler(device_type(device), **given)


def scaler_settings(config: MixedPrecisionConfig) -> dict[str, Any]:
    """Return the arguments of `LossScaler`, and `enabled`. Needs no torch."""
    if config.loss_scale is not None:
        return {"enabled": True, "init_scale": float(config.loss_scale), "constant": True}
    if not config.fp16:
        return {"enabled": False}
    values = config.to_dict(full=True)
    scale = {argument: values[field] for argument, field in SCALE_FIELDS.items()}
    return {"enabled": True, **scale, "growth_interval": int(scale["growth_interval"])}
