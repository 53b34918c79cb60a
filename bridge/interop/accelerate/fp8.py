"""Accelerate's FP8 back ends: Transformer Engine, torchao and MS-AMP, each with a recipe handler of its own.

What a handler says is not what runs: accelerate hands on only values that differ from its own defaults, so its default
`amax_compute_algo="most_recent"` never reaches Transformer Engine, whose own default is "max".
Source: accelerate 1.15.0 utils/dataclasses.py, utils/transformer_engine.py, utils/ao.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.interop.builders import WGRAD
from bridge.interop.float8 import MODULES, export_gather, export_layers, import_gather, report_gather
from bridge.interop.unsupported import report_rows

if TYPE_CHECKING:
    from bridge.interop.builders import ExportBuilder, ImportBuilder
    from bridge.interop.settings import Settings

__all__ = ["BACKENDS", "export_fp8", "import_fp8"]

VERSION = "accelerate 1.15.0"
BACKENDS = ("AO", "TE", "MSAMP")
UNREAD = {
    "amax_history_length": "amax_history_len",
    "amax_compute_algorithm": "amax_compute_algo",
    "optimization_level": "opt_level",
}
"""Keys that `accelerate config` writes and nothing reads -> the key that is read."""
READ = {
    "TE": (
        "margin",
        "interval",
        "fp8_format",
        "format",
        "amax_history_len",
        "amax_compute_algo",
        "override_linear_precision",
        "use_autocast_during_eval",
        "use_mxfp8_block_scaling",
    ),
    "AO": ("enable_fsdp_float8_all_gather", "pad_inner_dim", "config", "module_filter_func"),
    "MSAMP": ("opt_level",),
}


def import_fp8(builder: ImportBuilder, fp8: Settings, backend: str) -> None:
    """Map the settings of one back end."""
    for key, value in fp8.values.items():
        if key == "backend" or value is None:
            continue
        if key in UNREAD:
            detail = f"`accelerate config` writes this name, and what reads it asks for {UNREAD[key]} ({VERSION})"
            builder.report(fp8.name(key), value, "dead knob", detail, f"Rename it to {UNREAD[key]}.")
        elif key not in READ[backend]:
            other = next((name for name in BACKENDS if key in READ[name]), None)
            detail = f"a setting of the {other} back end" if other else f"not a setting of {VERSION}"
            builder.report(fp8.name(key), value, "dead knob", detail, "Drop it, or change the back end.")
    {"TE": _import_te, "AO": _import_ao, "MSAMP": _import_msamp}[backend](builder, fp8)


def _import_te(builder: ImportBuilder, fp8: Settings) -> None:
    name = "fp8_format" if fp8.given("fp8_format") else "format"
    format_ = (fp8.text(name) or "HYBRID").upper()
    if format_ not in ("HYBRID", "E4M3"):
        rule = "must be HYBRID or E4M3 (accelerate takes E5M2, and Transformer Engine refuses it)"
        raise fp8.wrong(name, rule, fp8.values.get(name), "Use HYBRID, whose gradients are E5M2")
    block = bool(fp8.switch("use_mxfp8_block_scaling"))
    fields: dict[str, Any] = {"fp8": format_.lower()}
    if block and format_ == "HYBRID":
        if fp8.given(name):
            detail = "accelerate's own default, so not handed on, and Transformer Engine's MXFP8 takes E4M3"
            builder.report(fp8.name(name), format_, "semantics", detail, "Write E4M3, which is what runs.")
        fields["fp8"] = "e4m3"
    if fp8.given(name):
        builder.map(fp8.name(name), **fields)
    else:
        detail = "HYBRID in accelerate; Transformer Engine's MXFP8 class has E4M3" if block else f"HYBRID in {VERSION}"
        builder.implied(fp8.name("fp8_format"), format_, detail, **fields)
    builder.fields["fp8_recipe"] = "mxfp8" if block else "delayed"
    if fp8.given("use_mxfp8_block_scaling"):
        builder.map(fp8.name("use_mxfp8_block_scaling"), fp8_recipe=builder.fields["fp8_recipe"])
    _amax(builder, fp8, block=block)
    if fp8.given("interval"):
        detail = "Transformer Engine 1.8 and later ignores it"
        builder.report(fp8.name("interval"), fp8["interval"], "dead knob", detail, "Drop it.")
    report_rows(builder, fp8, "accelerate_te")
    _overrides(builder, fp8)


def _amax(builder: ImportBuilder, fp8: Settings, *, block: bool) -> None:
    settings = {
        "margin": ("fp8_margin", fp8.whole("margin", least=0), 0),
        "amax_history_len": ("fp8_amax_history_len", fp8.whole("amax_history_len", least=1), 1024),
    }
    algorithm = fp8.word("amax_compute_algo", ("max", "most_recent"))
    if block:
        for key in (*settings, "amax_compute_algo"):
            if fp8.given(key):
                detail = "MXFP8 keeps no history; accelerate raises where it differs from the default"
                builder.report(fp8.name(key), fp8[key], "dead knob", detail, "Drop it.")
        return
    for key, (field, value, default) in settings.items():
        builder.take(fp8.name(key), field, value, default, f"{default} in {VERSION}")
    builder.fields["fp8_amax_compute_algo"] = "max"
    if algorithm == "max":
        builder.map(fp8.name("amax_compute_algo"), fp8_amax_compute_algo="max")
    else:
        detail = f"most_recent is {VERSION}'s default and is never handed on, so Transformer Engine takes max"
        reason = "implied default" if algorithm is None else "semantics"
        builder.report(fp8.name("amax_compute_algo"), algorithm, reason, detail, "Write max, which is what runs.")


def _overrides(builder: ImportBuilder, fp8: Settings) -> None:
    value = fp8.values.get("override_linear_precision")
    if value is None:
        return
    name = fp8.name("override_linear_precision")
    if value is False:  # as accelerate's own template has it
        builder.map(name)
        return
    if isinstance(value, str):
        value = [{"true": True, "false": False}.get(part.strip().lower()) for part in value.strip("()[]").split(",")]
    if not isinstance(value, list | tuple) or len(value) != 3 or any(type(part) is not bool for part in value):
        raise fp8.wrong(
            "override_linear_precision", "must be three of true and false", value, "Give fprop, dgrad, wgrad"
        )
    if not any(value):
        builder.map(name)
        return
    if value[2]:
        builder.map(name, fp8_wgrad=False)
    detail = "Transformer Engine 2.0 and later has no such argument and swallows it: every GEMM runs in FP8"
    builder.report(name, list(value), "dead knob", detail, "Drop it.")


def _import_ao(builder: ImportBuilder, fp8: Settings) -> None:
    builder.fields |= {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    gather = fp8.switch("enable_fsdp_float8_all_gather")
    name = fp8.name("enable_fsdp_float8_all_gather")
    if gather is None:
        builder.implied(name, True, f"on in {VERSION}, off in torchao itself", fp8_param_gather=True)
        report_gather(builder, name)
    else:
        import_gather(builder, name, gather)
    fp8.switch("pad_inner_dim")
    report_rows(builder, fp8, "accelerate_ao")
    detail = "the first and the last nn.Linear stay in high precision: modules, not layers"
    if fp8.given("module_filter_func"):
        detail = "a function that chooses modules cannot be converted"
    builder.report(
        fp8.name("module_filter_func"), fp8.values.get("module_filter_func"), "approximated", detail, MODULES
    )


def _import_msamp(builder: ImportBuilder, fp8: Settings) -> None:
    level = fp8.word("opt_level", ("O1", "O2")) or "O2"
    detail = "MS-AMP keeps gradients and optimizer state in 8 bits; nothing in Megatron does, and it is unmaintained"
    remedy = "Choose an FP8 recipe by hand; BF16 was written."
    builder.report(fp8.name("opt_level"), level, "unsupported", detail, remedy)


def export_fp8(builder: ExportBuilder) -> dict[str, Any] | None:
    """Return the `fp8_config` for the config's FP8, or None where no back end has it."""
    config = builder.config
    block: dict[str, Any]
    if config.fp8 == "hybrid" and config.fp8_recipe == "tensorwise":
        block = {"backend": "AO", "enable_fsdp_float8_all_gather": config.fp8_param_gather, "pad_inner_dim": True}
        mapped = {"fp8": "backend", "fp8_recipe": "backend"}
        if not config.fp8_param_gather:
            mapped |= dict.fromkeys(("fp8_param_gather", "fp8_param"), "enable_fsdp_float8_all_gather")
        export_gather(builder)
        export_layers(builder, "Pass a module_filter_func to choose them.")
    elif config.fp8_recipe == "mxfp8":
        block = {"backend": "TE", "fp8_format": str(config.fp8).upper(), "use_mxfp8_block_scaling": True}
        mapped = {"fp8": "fp8_format", "fp8_recipe": "use_mxfp8_block_scaling"}
    elif config.fp8_recipe == "delayed":
        block = {
            "backend": "TE",
            "fp8_format": str(config.fp8).upper(),
            "margin": config.fp8_margin,
            "amax_history_len": config.fp8_amax_history_len,
            "amax_compute_algo": "max",
        }
        mapped = {"fp8": "fp8_format", "fp8_recipe": "backend"}
        mapped |= {"fp8_margin": "margin", "fp8_amax_history_len": "amax_history_len"}
        if config.fp8_amax_compute_algo == "max":
            mapped["fp8_amax_compute_algo"] = "amax_compute_algo"
        else:
            detail = "accelerate never hands most_recent on, and Transformer Engine takes max; max was written"
            remedy = "Use a history of 1, under which both are the same."
            builder.report("fp8_amax_compute_algo", "approximated", detail, remedy)
        if not config.fp8_wgrad:
            builder.report("fp8_wgrad", "dead knob", WGRAD, "Drop it.")
    else:
        detail = f"no back end of {VERSION} has {config.fp8_recipe} scaling in {config.fp8}, so no FP8 was written"
        fields = ("fp8", "fp8_recipe", "fp8_param_gather")
        builder.report_if_on(fields, detail, "Use delayed, MXFP8 or tensorwise hybrid scaling.")
        return None
    for field, setting in mapped.items():
        builder.map(field, f"fp8_config.{setting}")
    if block["backend"] == "TE" and config.fp8_param_gather:
        detail = "accelerate replaces modules of a finished model and keeps its weights as they are"
        remedy = "Do without FP8 weights there."
        builder.report_if_stated(("fp8_param_gather", "fp8_param"), "unsupported", detail, remedy)
    return block
