"""Autocast over FP32 weights, the "mixed precision" of most trainers, and Megatron's modes converted to it.

BF16   fp32=True, autocast_enabled=True, autocast_dtype="bf16": the recipe `bf16_autocast_mixed`
FP16   fp16=True too, with params_dtype="fp32": only the `fp16` switch has a loss scale

FP16 has torch's `GradScaler` there, with other defaults and fewer settings than Megatron's own scaler:

    scale on overflow: times backoff_factor at once (Megatron: after `hysteresis` overflows)
    scale afterwards:  times growth_factor after growth_interval good steps (Megatron: `loss_scale_window`)
    floor:             none, it goes below 1 (Megatron: `min_loss_scale`)
    constant scale:    not possible

Source: PyTorch 2.13 torch/amp/grad_scaler.py.
"""

from types import MappingProxyType
from typing import Any

from bridge.interop.builders import ExportBuilder, ImportBuilder
from bridge.interop.meaning import semantics_of, unread_fields
from bridge.interop.reading.settings import Settings

TORCH_SCALER = MappingProxyType({"initial_loss_scale": 65536.0, "loss_scale_window": 2000, "hysteresis": 1})
"""Our field -> what an untouched `torch.amp.GradScaler` amounts to."""

SCALER_USUAL = {"growth_factor": 2.0, "backoff_factor": 0.5, "enabled": True}
"""Argument of a `GradScaler` without one of Megatron's -> the value that Megatron's amounts to."""
NAMES = {"initial_loss_scale": "init_scale", "loss_scale_window": "growth_interval", "hysteresis": "hysteresis"}


def amp_fields(compute: str) -> dict[str, object]:
    """Return the fields of autocast to `compute` over FP32 weights; of plain FP32 where that is "fp32"."""
    if compute == "fp32":
        return {"fp32": True}
    mode: dict[str, object] = {"fp32": True} if compute == "bf16" else {"fp16": True, "params_dtype": "fp32"}
    return mode | {"autocast_enabled": True, "autocast_dtype": compute}


def report_dropped_autocast(builder: ExportBuilder, detail: str) -> None:
    """Record the run of a system over Megatron Core that never opens autocast, because `detail`: its mode decides."""
    config, mode, semantics = builder.config, builder.config.mode, semantics_of(builder.config)
    if not config.autocast_enabled:
        return
    if semantics == "amp_o1" and mode == "fp32":
        compute = builder.values["autocast_dtype"]
        runs, choice = "it trains in FP32", f"take {compute}_mixed if {compute.upper()} weights are meant"
        builder.report("autocast_enabled", "semantics", f"{detail}; {runs}", f"FP32 there; {choice}.")
        return
    runs = f"it trains {mode.upper()} weights with FP32 masters"
    if semantics == "amp_o1":
        remedy = f"{mode.upper()} weights there, as {mode}_mixed; take fp32 if FP32 weights are meant."
        builder.report("params_dtype", "semantics", f"{mode} casts every weight, and {detail}; {runs}", remedy)
    else:
        remedy = f"{mode.upper()} there, in norms and softmax too; state autocast_enabled=False if that is meant."
    builder.report("autocast_enabled", "semantics", f"{detail}; {runs}", remedy)


def export_as_amp(builder: ExportBuilder, *settings: str) -> str:
    """Map the mode to `settings` as autocast over FP32 weights; return the compute it casts to, "fp32" for none."""
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
            builder.record("pytorch.casts-fp32-weights", mode, mode=mode)
        if config.grad_reduce_in_fp32:
            builder.map("grad_reduce_in_fp32")
        return compute
    builder.exported_mode = "fp16" if mode == "fp16" else "fp32"
    for field in (mode, "params_dtype", "autocast_enabled", "autocast_dtype"):
        if field == mode or (field in config.stated and field not in unread_fields(config)):
            builder.record("pytorch.keeps-fp32-weights", field, mode=mode)
    if config.grad_reduce_in_fp32:
        builder.map("grad_reduce_in_fp32")
    else:
        builder.record_if_stated("pytorch.gradients-of-fp32-weights", "grad_reduce_in_fp32")
    return mode


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
    builder.record("pytorch.a-torch-gradscaler-has", "GradScaler.min_scale", None)


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
            builder.record("pytorch.megatron-scaler-has", scaler.name(key), scaler[key], usual=usual)
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
        builder.record("pytorch.always-scales-dynamically", "loss_scale", where=where)
        for field in (*TORCH_SCALER, "min_loss_scale"):
            builder.record_if_stated("pytorch.a-constant-scale-does", field, where=where)
        return
    for field, default in TORCH_SCALER.items():
        if field in settable:
            continue
        if builder.values[field] == default:
            builder.map(field)
        else:
            builder.record("pytorch.makes-a-torch-gradscaler", field, where=where, default=default)
    builder.record_if_stated("pytorch.a-torch-gradscaler-has-no", "min_loss_scale")


def export_scaler(builder: ExportBuilder, where: str, setting: str) -> dict[str, Any]:
    """Return the arguments of a `GradScaler` that `setting` has `where` make, with what it lacks reported."""
    builder.map("initial_loss_scale", f"{setting}.init_scale")
    builder.map("loss_scale_window", f"{setting}.growth_interval")
    report_scaler(builder, where, settable=("initial_loss_scale", "loss_scale_window"))
    config = builder.config
    return {"init_scale": float(config.initial_loss_scale or 65536.0), "growth_interval": int(config.loss_scale_window)}


def report_no_scaler(builder: ExportBuilder, detail: str, remedy: str) -> None:
    """Report what is stated of FP16's loss scale, of which the other system has none."""
    for field in ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
        if builder.config.fp16 and builder.values[field] is not None:
            builder.report_if_stated(field, "unsupported", detail, remedy)
