"""torch's `GradScaler`, which most trainers use for FP16, and Megatron's own: other defaults, fewer settings.

    scale on overflow: times backoff_factor at once (Megatron: after `hysteresis` overflows)
    scale afterwards:  times growth_factor after growth_interval good steps (Megatron: `loss_scale_window`)
    floor:             none, it goes below 1 (Megatron: `min_loss_scale`)
    constant scale:    not possible

Source: PyTorch 2.13 torch/amp/grad_scaler.py.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.interop.builders import ExportBuilder, ImportBuilder

__all__ = ["TORCH_SCALER", "assume_torch_scaler", "report_scaler"]

TORCH_SCALER = MappingProxyType({"initial_loss_scale": 65536.0, "loss_scale_window": 2000, "hysteresis": 1})
"""Our field -> what an untouched `torch.amp.GradScaler` amounts to."""

NAMES = {"initial_loss_scale": "init_scale", "loss_scale_window": "growth_interval", "hysteresis": "hysteresis"}


def assume_torch_scaler(builder: ImportBuilder, where: str, *, given: tuple[str, ...] = ()) -> None:
    """Note the defaults of a `GradScaler` that `where` makes, except for the fields in `given`."""
    for field, value in TORCH_SCALER.items():
        if field in given:
            continue
        builder.fields[field] = value
        detail = f"{where} makes a torch GradScaler with {value:g} (PyTorch 2.13)"
        if field == "hysteresis":
            detail = "a torch GradScaler halves the scale at the first overflow (PyTorch 2.13)"
        remedy = f"State {field} for Megatron's own default."
        builder.report(f"GradScaler.{NAMES[field]}", value, "implied default", detail, remedy)
    detail = "a torch GradScaler has no smallest scale and goes below 1 (PyTorch 2.13)"
    builder.report(
        "GradScaler.min_scale", None, "unsupported", detail, "Megatron stays at min_loss_scale, 1 by default."
    )


def report_scaler(builder: ExportBuilder, where: str, *, settable: tuple[str, ...] = ()) -> None:
    """Note what a `GradScaler` made by `where` cannot do of the FP16 scale that the config asks for."""
    config = builder.config
    if not config.fp16:
        return
    if config.loss_scale is not None:
        detail = f"{where} always scales dynamically"
        builder.report("loss_scale", "unsupported", detail, "Use DeepSpeed or Megatron for a constant scale.")
        for field in (*TORCH_SCALER, "min_loss_scale"):
            detail = f"a constant scale does not read it, and the dynamic one of {where} has its own"
            builder.report_if_stated(field, "dead knob", detail, "Drop it.")
        return
    for field, default in TORCH_SCALER.items():
        if field in settable:
            continue
        if builder.values[field] == default:
            builder.map(field)
        else:
            detail = f"{where} makes a torch GradScaler, which has {default:g} here"
            builder.report(field, "unsupported", detail, "The scale adapts to overflows; watch the first steps.")
    detail = "a torch GradScaler has no smallest scale"
    builder.report_if_stated("min_loss_scale", "unsupported", detail, "Stop the run should the scale fall below 1.")
