"""Plain PyTorch: autocast, `GradScaler`, FSDP policy, torchao's config and TF32 as one mapping of settings.

The functions that make PyTorch's objects of a recipe stand in `bridge.pytorch`, and can be imported from here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bridge.interop import fsdp, torchao
from bridge.interop.amp import amp_fields, export_as_amp
from bridge.interop.builders import ExportBuilder, ImportBuilder
from bridge.interop.contract import ExportReport, ImportReport, Recognised, System, as_json
from bridge.interop.scaler import assume_torch_scaler
from bridge.interop.settings import Settings
from bridge.pytorch import (
    apply_tf32,
    autocast_for,
    emulate_linears,
    float8_linear_config_for,
    fsdp_policy_for,
    grad_scaler_for,
)
from bridge.pytorch.grad_scaler import SCALE_FIELDS, scaler_settings

if TYPE_CHECKING:
    from bridge.registry.config import MixedPrecisionConfig

__all__ = [
    "SYSTEM",
    "apply_tf32",
    "autocast_for",
    "emulate_linears",
    "export",
    "float8_linear_config_for",
    "fsdp_policy_for",
    "grad_scaler_for",
    "import_",
]

TITLE = "PyTorch"
VERSION = "PyTorch 2.13.0"


def import_(payload: object) -> ImportReport:
    """Return what a plain PyTorch set-up asks for.

    Args:
        payload: A mapping with any of ``autocast`` (`dtype`, `enabled`), ``grad_scaler``, ``tf32``, ``fsdp`` (a policy)
            and ``float8`` or ``mxfp8`` (torchao's), as data or as the objects themselves.
    """
    top = Settings(payload, TITLE)
    builder = ImportBuilder(TITLE)
    compute = _autocast(builder, top)
    policy = fsdp.import_(top["fsdp"]) if top.given("fsdp") else None
    semantics = "fp32" if compute == "fp32" else "amp_o1"
    if policy is not None and compute == "fp32":
        semantics = policy.semantics
        builder.fields = {**policy.config.to_dict()}
        for name, fields in policy.mapped.items():
            builder.map(f"fsdp.{name}", **{field: builder.fields[field] for field in fields})
    elif policy is not None:
        detail = "autocast casts again what FSDP has gathered"
        builder.report("fsdp", "a policy", "dead knob", detail, "Keep one of the two.")
    for loss in policy.unmapped if policy is not None else ():
        builder.report(f"fsdp.{loss.field}", loss.value, loss.reason, loss.detail, loss.remedy)
    _scaler(builder, top, compute)
    if top.given("tf32"):
        builder.map("tf32", tf32=bool(top.switch("tf32")))
    for kind in ("float8", "mxfp8"):
        if top.given(kind):
            _linear(builder, kind, top[kind])
    return builder.finish(semantics)


def export(config: MixedPrecisionConfig) -> ExportReport:
    """Return the set-up as data; the functions of `bridge.pytorch` make the objects."""
    builder = ExportBuilder(config, TITLE)
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
    if linear.payload:
        payload |= linear.payload
        for field in ("fp8", "fp8_recipe", "fp8_wgrad"):
            if field in linear.mapped:
                builder.map(field, *linear.mapped[field])
        for loss in linear.unmapped:
            if loss.reason == "approximated":
                builder.report(loss.field, loss.reason, loss.detail, loss.remedy)
    elif config.fp8 is not None or config.fp4 is not None:
        detail = f"neither torch nor torchao 0.18 has {config.scheme} scaling"
        fields = ("fp8", "fp8_recipe") if config.fp8 else ("fp4", "fp4_recipe")
        builder.report_if_stated(fields, "unsupported", detail, "emulate_linears runs it, emulated, on any device.")
    return builder.finish(payload)


def _autocast(builder: ImportBuilder, top: Settings) -> str:
    given: Any = top.values.get("autocast")
    if given is not None and not isinstance(given, Mapping) and hasattr(given, "fast_dtype"):
        given = {"dtype": given.fast_dtype, "enabled": given._enabled, "device_type": given.device}
    block = Settings({} if given is None else given, TITLE, "autocast")
    enabled = block.switch("enabled")
    on = bool(block.values) if enabled is None else enabled
    name = block.name("dtype")
    if not on:
        if enabled is not None:
            builder.map(block.name("enabled"), fp32=True)
        else:
            builder.implied("autocast", None, f"off in {VERSION}", fp32=True)
        if block.given("dtype"):
            builder.map(name)
        return "fp32"
    if not block.given("dtype"):
        compute = "bf16" if block.values.get("device_type") == "cpu" else "fp16"
        builder.implied(name, compute, f"BF16 on a CPU and FP16 on CUDA in {VERSION}", **amp_fields(compute))
    else:
        rule = "must be bfloat16 or float16 (autocast warns and switches itself off for others)"
        compute = str(block.dtype("dtype", rule))
        builder.map(name, **amp_fields(compute))
    if enabled is not None:
        builder.map(block.name("enabled"))
    return compute


def _scaler(builder: ImportBuilder, top: Settings, compute: str) -> None:
    given: Any = top.values.get("grad_scaler")
    if given is not None and not isinstance(given, Mapping) and hasattr(given, "get_growth_interval"):
        given = {
            "enabled": given.is_enabled(),
            "init_scale": given._init_scale if given.is_enabled() else None,
            "growth_interval": given.get_growth_interval() if given.is_enabled() else None,
            **{key: getattr(given, key) for key in ("hysteresis", "min_scale", "constant") if hasattr(given, key)},
        }
    block = Settings({} if given is None else given, TITLE, "grad_scaler")
    used = block.switch("enabled") is not False and bool(block.values)
    if block.given("enabled"):
        builder.map(block.name("enabled"))
    if compute == "fp16" and not used:
        detail = "FP16 without a loss scale: small gradients become zero"
        builder.report("grad_scaler", None, "semantics", detail, "Megatron always scales in FP16.")
    if not used:
        return
    if block.switch("constant"):
        builder.map(block.name("init_scale"), loss_scale=block.number("init_scale", least=0))
        builder.map(block.name("constant"))
        return
    if compute != "fp16":
        detail = f"a scale has nothing to do in {compute}: its range is that of FP32"
        builder.report("grad_scaler", "enabled", "dead knob", detail, "Drop it.")
        return
    taken = []
    for key, field in SCALE_FIELDS.items():
        value = block.number(key, least=0)
        if value is not None:
            builder.map(block.name(key), **{field: value})
            taken.append(field)
    for key, usual in (("growth_factor", 2.0), ("backoff_factor", 0.5)):
        value = block.number(key)
        if value is not None and value != usual:
            builder.report(block.name(key), value, "unsupported", f"Megatron has {usual:g} built in", "Accept it.")
    if not {"hysteresis", "min_loss_scale"} <= set(taken):
        assume_torch_scaler(builder, "torch.amp", given=tuple(taken))


def _linear(builder: ImportBuilder, kind: str, given: Any) -> None:
    found = torchao.import_({kind: given} if isinstance(given, Mapping) else given, mode="bf16")
    fields = {name: value for name, value in found.config.to_dict().items() if name != "bf16"}
    builder.fields |= fields
    for name, into in found.mapped.items():
        builder.map(f"{kind}.{name.rpartition('.')[2]}", **{field: fields[field] for field in into if field in fields})
    for loss in found.unmapped:
        builder.report(loss.field, loss.value, loss.reason, loss.detail, loss.remedy)


def _recognise(document: Any) -> Recognised | None:
    content = document.mapping
    if isinstance(content.get("autocast"), Mapping) and "grad_scaler" in content:
        return Recognised(certainty=0.8, evidence="has `autocast` and `grad_scaler`, as this program writes them")
    return None


SYSTEM = System(
    name="pytorch",
    title="plain PyTorch",
    version=VERSION,
    import_=import_,
    export=export,
    recognise=_recognise,
    write=as_json,
)
