"""Autocast over FP32 weights, read as Megatron's modes and written for other trainers.

Most trainers call this mixed precision. In this project it has these fields:

    compute    fields of a recipe
    BF16       fp32=True, autocast_enabled=True, autocast_dtype="bf16": `bf16_autocast_mixed`
    FP16       fp16=True, params_dtype="fp32", autocast_enabled=True, autocast_dtype="fp16":
               only the `fp16` switch has a loss scale

In FP16 these trainers use torch's `GradScaler`. It has other defaults and fewer settings than the
scaler of Megatron:

    scale on overflow: times backoff_factor at once (Megatron: after `hysteresis` overflows)
    scale afterwards:  times growth_factor after growth_interval good steps (Megatron: `loss_scale_window`)
    floor:             none, it goes below 1 (Megatron: `min_loss_scale`)
    constant scale:    not possible

Source: PyTorch 2.13 torch/amp/grad_scaler.py.
"""

from collections.abc import Sequence
from types import MappingProxyType

from bridge.precision.mode import get_mode
from bridge.read.foreign.effective_fields import collect_inert_everywhere
from bridge.read.foreign.export_builder import ExportBuilder
from bridge.read.foreign.import_builder import ImportBuilder
from bridge.read.foreign.semantics import get_semantics
from bridge.runtime.pytorch.loop import get_compute_dtype

TORCH_SCALER_DEFAULTS = MappingProxyType(
    {"initial_loss_scale": 65536.0, "loss_scale_window": 2000, "hysteresis": 1}
)
"""Field -> the value that it has under the defaults of `torch.amp.GradScaler`."""

SCALER_ARGUMENTS = {
    "initial_loss_scale": "init_scale",
    "loss_scale_window": "growth_interval",
    "hysteresis": "hysteresis",
}
"""Field -> the argument of `torch.amp.GradScaler`.

`hysteresis` has no such argument. Records name the field.
"""


def make_amp_fields(compute: str) -> dict[str, object]:
    """Return the fields of autocast over FP32 weights.

    Args:
        compute: The dtype that autocast casts to: bf16 or fp16. fp32: no autocast.
    """
    if compute == "fp32":
        return {"fp32": True}
    autocast = {"autocast_enabled": True, "autocast_dtype": compute}
    if compute == "bf16":
        return {"fp32": True, **autocast}
    return {"fp16": True, "params_dtype": "fp32", **autocast}


def report_dropped_autocast(builder: ExportBuilder, why: str = "") -> None:
    """Record that autocast is dropped, for a system on Megatron Core that never enables it.

    Args:
        builder: The report of the export.
        why: The reason, as a clause. Empty: the reason of NeMo 2 and Megatron Bridge, which copy
            fields to config fields of the same name. Source: their mixed_precision.py, 2.6.2 and
            0.6.2.
    """
    if not builder.config.autocast_enabled:
        return
    if not why:
        why = f"{builder.system} copies fields of the same name, and Megatron's is enable_autocast"
    mode = get_mode(builder.config)
    compute = str(builder.values["autocast_dtype"])
    facts = {
        "why": why,
        "mode": mode,
        "runs": mode.upper(),
        "compute": compute,
        "casts": compute.upper(),
    }
    if get_semantics(builder.config) != "amp_o1":
        builder.record("pytorch.no-autocast-around-half-weights", "autocast_enabled", **facts)
    elif mode == "fp32":
        builder.record("pytorch.no-autocast-over-fp32-weights", "autocast_enabled", **facts)
    else:
        builder.record("pytorch.mode-casts-weights", "params_dtype", **facts)
        builder.record("pytorch.no-autocast-over-cast-weights", "autocast_enabled", **facts)


def export_as_amp(builder: ExportBuilder, *settings: str) -> str:
    """Map the mode to settings for a trainer that has only autocast over FP32 weights.

    A mode with half-precision weights becomes such autocast too, and the difference is recorded.

    Args:
        builder: The report of the export.
        settings: The settings that the mode becomes.

    Returns:
        The dtype that autocast casts to; "fp32" without autocast.
    """
    config = builder.config
    mode = get_mode(config)
    semantics = get_semantics(config)
    compute = get_compute_dtype(config)
    builder.exported_mode = "fp32"
    if compute == "fp16":
        builder.exported_mode = "fp16"
    if semantics == "fp32":
        builder.map("fp32", *settings)
        builder.map_dtype("params_dtype", *settings)
        return compute
    if config.grad_reduce_in_fp32:
        builder.map("grad_reduce_in_fp32")
    if semantics == "amp_o1":
        _map_autocast(builder, mode, compute, settings)
        return compute
    inert = collect_inert_everywhere(config)
    builder.record("pytorch.keeps-fp32-weights", mode, mode=mode)
    for field in ("params_dtype", "autocast_enabled", "autocast_dtype"):
        if field in config.stated and field not in inert:
            builder.record("pytorch.keeps-fp32-weights", field, mode=mode)
    if not config.grad_reduce_in_fp32:
        builder.record_if_stated("pytorch.gradients-of-fp32-weights", "grad_reduce_in_fp32")
    return mode


def _map_autocast(builder: ExportBuilder, mode: str, compute: str, settings: Sequence[str]) -> None:
    """Map the fields of autocast over FP32 weights.

    The mode is mapped only if it is FP32, or FP16 for autocast to FP16. In any other mode Megatron
    would cast the weights, and this is recorded.
    """
    for field in ("autocast_enabled", "autocast_dtype", "params_dtype"):
        builder.map(field, *settings)
    if mode in ("fp32", compute) and mode != "bf16":
        builder.map(mode, *settings)
    else:
        builder.record("pytorch.casts-fp32-weights", mode, mode=mode)


def export_as_cast(builder: ExportBuilder, autocast_sentence: str, *settings: str) -> str:
    """Map the mode to settings for a trainer that casts the weights.

    Args:
        builder: The report of the export.
        autocast_sentence: The sentence about autocast over FP32 weights, which becomes a cast too.
        settings: The settings that the mode becomes.

    Returns:
        The dtype that the weights are cast to.
    """
    mode = get_mode(builder.config)
    compute = get_compute_dtype(builder.config)
    builder.exported_mode = compute
    if get_semantics(builder.config) == "amp_o1":
        fields = (mode, "autocast_enabled", "autocast_dtype", "params_dtype")
        builder.record_if_stated(autocast_sentence, *fields, compute=compute)
    else:
        builder.map(mode, *settings)
        builder.map_dtype("params_dtype", settings[0])
    return compute


def assume_torch_scaler(builder: ImportBuilder, where: str) -> None:
    """State the defaults of torch's `GradScaler`, and record them.

    Args:
        builder: The report of the import.
        where: The program that makes the scaler.
    """
    for field, value in TORCH_SCALER_DEFAULTS.items():
        sentence = "pytorch.torch-scaler-default"
        if field == "hysteresis":
            sentence = "pytorch.torch-scaler-halves"
        setting = f"GradScaler.{SCALER_ARGUMENTS[field]}"
        builder.record(sentence, setting, value, {field: value}, where=where, field=field)
    builder.record("pytorch.torch-scaler-has-no-smallest-scale", "GradScaler.min_scale", None)


def report_scaler(builder: ExportBuilder, where: str) -> None:
    """Record the fields of the FP16 loss scale that torch's `GradScaler` cannot have.

    Args:
        builder: The report of the export.
        where: The program that makes the scaler.
    """
    if not builder.config.fp16:
        return
    if builder.config.loss_scale is not None:
        builder.record("pytorch.always-scales-dynamically", "loss_scale", where=where)
        return
    for field, default in TORCH_SCALER_DEFAULTS.items():
        if builder.values[field] == default:
            builder.map(field)
        else:
            builder.record(
                "pytorch.torch-scaler-begins-with-its-default", field, where=where, default=default
            )
    builder.record_if_stated("pytorch.torch-scaler-writes-no-smallest-scale", "min_loss_scale")
