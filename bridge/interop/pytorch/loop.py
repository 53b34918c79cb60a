"""Plain PyTorch: autocast, `GradScaler`, torchao's config and TF32 as one mapping of settings, written and not read."""

from typing import Any

from bridge.interop.builders import ExportBuilder
from bridge.interop.contract import ExportReport, System, as_json
from bridge.interop.pytorch import torchao
from bridge.interop.pytorch.amp import TABLE, export_as_amp
from bridge.pytorch.loop import SCALE_FIELDS, scaler_settings
from bridge.registry.config import MixedPrecisionConfig


def export(config: MixedPrecisionConfig) -> ExportReport:
    """Return the set-up as data; the functions of `bridge.pytorch` make the objects."""
    builder = ExportBuilder(config, TABLE.title)
    compute = export_as_amp(builder, "autocast.dtype", "autocast.enabled")
    payload: dict[str, Any] = {"autocast": {"dtype": compute, "enabled": compute != "fp32"}}
    payload["grad_scaler"] = scaler_settings(config)
    if config.loss_scale is not None:
        builder.map("loss_scale", "grad_scaler.init_scale")
    elif config.fp16:
        for key, field in SCALE_FIELDS.items():
            builder.map(field, f"grad_scaler.{key}")
    if config.tf32 is not None:
        payload["tf32"] = config.tf32
        builder.map("tf32", "tf32")
    linear = torchao.export(config)
    payload |= linear.payload
    for field in ("fp8", "fp8_recipe", "fp8_wgrad"):
        if field in linear.mapped:
            builder.map(field, *linear.mapped[field])
    return builder.finish(payload, TABLE.unwritten)


SYSTEM = System("pytorch", "plain PyTorch", TABLE.version, export, write=as_json)
