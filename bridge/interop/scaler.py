"""torch's `GradScaler`, which most trainers use for FP16, and Megatron's own: other defaults, fewer settings.

    scale on overflow: times backoff_factor at once (Megatron: after `hysteresis` overflows)
    scale afterwards:  times growth_factor after growth_interval good steps (Megatron: `loss_scale_window`)
    floor:             none, it goes below 1 (Megatron: `min_loss_scale`)
    constant scale:    not possible

Source: PyTorch 2.13 torch/amp/grad_scaler.py.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge.interop.builders import ExportBuilder, ImportBuilder
    from bridge.interop.settings import Settings


TORCH_SCALER = MappingProxyType({"initial_loss_scale": 65536.0, "loss_scale_window": 2000, "hysteresis": 1})
"""Our field -> what an untouched `torch.amp.GradScaler` amounts to."""

SCALER_USUAL = {"growth_factor": 2.0, "backoff_factor": 0.5, "enabled": True}
"""Argument of a `GradScaler` without one of Megatron's -> the value that Megatron's amounts to."""
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


def import_scaler(builder: ImportBuilder, scaler: Settings, where: str) -> bool:
    """Map the arguments of a `GradScaler` that `where` makes; return whether Megatron's own lacks one of them."""
    taken, lacks = [], False
    for key, field in (("init_scale", "initial_loss_scale"), ("growth_interval", "loss_scale_window")):
        value = scaler.number(key, least=0) if key == "init_scale" else scaler.whole(key, least=1)
        if value is not None:
            builder.map(scaler.name(key), **{field: value})
            taken.append(field)
    for key, usual in SCALER_USUAL.items():
        if scaler.given(key) and scaler[key] != usual:
            lacks = True
            detail = f"Megatron's scaler has no such setting and acts as with {usual}"
            builder.report(scaler.name(key), scaler[key], "unsupported", detail, "Set it in the program.")
        elif scaler.given(key):
            builder.map(scaler.name(key))
    assume_torch_scaler(builder, where, given=tuple(taken))
    return lacks


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


def export_scaler(builder: ExportBuilder, where: str, setting: str) -> dict[str, Any]:
    """Return the arguments of a `GradScaler` that `setting` has `where` make, with what it lacks reported."""
    builder.map("initial_loss_scale", f"{setting}.init_scale")
    builder.map("loss_scale_window", f"{setting}.growth_interval")
    report_scaler(builder, where, settable=("initial_loss_scale", "loss_scale_window"))
    config = builder.config
    return {
        "init_scale": float(config.initial_loss_scale or 65536.0),
        "growth_interval": int(config.loss_scale_window),
    }


def report_no_scaler(builder: ExportBuilder, detail: str, remedy: str) -> None:
    """Report what is stated of FP16's loss scale, of which the other system has none."""
    for field in ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
        if builder.config.fp16 and builder.values[field] is not None:
            builder.report_if_stated(field, "unsupported", detail, remedy)
