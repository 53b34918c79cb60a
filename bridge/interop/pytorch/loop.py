"""Plain PyTorch: autocast, `GradScaler`, torchao's config and TF32 as one mapping of settings."""

from typing import Any

from bridge.interop.builders import ExportBuilder, ImportBuilder
from bridge.interop.contract import ExportReport, ImportReport, System, as_json
from bridge.interop.pytorch import torchao
from bridge.interop.pytorch.amp import TABLE, amp_fields, export_as_amp
from bridge.interop.reading.settings import Settings
from bridge.pytorch.loop import SCALE_FIELDS, scaler_settings
from bridge.registry.config import MixedPrecisionConfig


def import_(payload: object) -> ImportReport:
    """Return what autocast, a `GradScaler` and TF32 in one mapping ask for; converted linear layers are reported."""
    top = Settings(payload, TABLE.title)
    builder = ImportBuilder(TABLE.title)
    compute = _autocast(builder, top.section("autocast"))
    block = top.section("grad_scaler")
    is_used = block.switch("enabled") is not False and bool(block.values)
    if compute == "fp16" and not is_used:
        builder.record("pytorch.fp16-without-scale", "grad_scaler", None)
    constant = is_used and block.switch("constant")
    if is_used and compute != "fp16" and not constant:
        builder.record("pytorch.scale-without-fp16", "grad_scaler", "enabled", compute=compute)
    TABLE.read(builder, block, "constant" if constant else "scaler", used=is_used, fp16=compute == "fp16")
    TABLE.read(builder, top)
    return builder.finish("fp32" if compute == "fp32" else "amp_o1")


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
        payload |= TABLE.write(builder, "")
    linear = torchao.export(config)
    payload |= linear.payload
    for field in ("fp8", "fp8_recipe", "fp8_wgrad") if linear.payload else ():
        if field in linear.mapped:
            builder.map(field, *linear.mapped[field])
        for loss in linear.unmapped:
            if loss.field == field and loss.reason == "approximated":
                builder.report(field, loss.reason, loss.detail, loss.remedy)
    return builder.finish(payload, TABLE.unwritten)


def _autocast(builder: ImportBuilder, block: Settings) -> str:
    enabled, name = block.switch("enabled"), block.name("dtype")
    compute = block.dtype("dtype", "must be bfloat16 or float16 (autocast warns and switches itself off for others)")
    if not (bool(block.values) if enabled is None else enabled):
        if enabled is None:
            builder.implied("autocast", None, f"off in {TABLE.version}", fp32=True)
        else:
            builder.map(block.name("enabled"), fp32=True)
        if compute is not None:
            builder.map(name)
        return "fp32"
    if compute is None:
        compute = "bf16" if block.values.get("device_type") == "cpu" else "fp16"
        builder.implied(name, compute, f"BF16 on a CPU and FP16 on CUDA in {TABLE.version}", **amp_fields(compute))
    else:
        builder.map(name, **amp_fields(compute))
    if enabled is not None:
        builder.map(block.name("enabled"))
    return compute


SYSTEM = System("pytorch", "plain PyTorch", TABLE.version, import_, export, TABLE.recognise, as_json)
