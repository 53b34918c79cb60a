"""Lightning's precision plugins: what each of them trains in, Transformer Engine's among them.

`TransformerEnginePrecision` takes a mapping, which can only be delayed scaling, or a recipe object, which no file can
hold. Its format is an enum's name, upper case; keys it does not know are swallowed.
Source: Lightning 2.6.6 fabric/plugins/precision, Transformer Engine 2.20 common/recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge.interop.amp import amp_fields
from bridge.interop.lightning.instances import instance
from bridge.interop.scaler import SCALER_USUAL, assume_torch_scaler, import_scaler, report_no_scaler
from bridge.interop.settings import Settings

if TYPE_CHECKING:
    from bridge.interop.builders import ExportBuilder, ImportBuilder
    from bridge.interop.contract import ExportReport, ImportReport

__all__ = ["PRECISIONS", "export_te", "import_plugin", "import_sharded", "import_te", "import_true"]

TITLE = "Lightning"
VERSION = "Lightning 2.6.6"
PRECISIONS = {
    "32": ("fp32", "amp_o1"),
    "32-true": ("fp32", "amp_o1"),
    "16": ("fp16", "amp_o1"),
    "16-mixed": ("fp16", "amp_o1"),
    "bf16": ("bf16", "amp_o1"),
    "bf16-mixed": ("bf16", "amp_o1"),
    "16-true": ("fp16", "true"),
    "bf16-true": ("bf16", "true"),
    "64": ("fp64", "true"),
    "64-true": ("fp64", "true"),
    "transformer-engine": ("bf16", "te"),
    "transformer-engine-float16": ("fp16", "te"),
}
"""Values of `Trainer(precision=)`, case and all -> dtype and kind."""
OWN = "of Lightning's own"
UNREAD = ("BitsandbytesPrecision", "DeepSpeedPrecision", "XLAPrecision")
"""Precision plugins of Lightning's own that are not read."""
DELAYED = {"margin": ("fp8_margin", 0), "amax_history_len": ("fp8_amax_history_len", 1024)}
TE_PLUGIN = "lightning.pytorch.plugins.TransformerEnginePrecision"


def import_true(builder: ImportBuilder, name: str, word: str, compute: str) -> ImportReport:
    """Return the import of half-precision weights with nothing in FP32."""
    if compute == "fp64":
        detail = "FP64 throughout; FP32 was stated"
        builder.fields["fp32"] = True
        builder.report(name, word, "unsupported", detail, "Megatron has no FP64 training.")
        return replace(builder.finish("fp32"), recipe=None)
    builder.map(name, **{compute: True, "params_dtype": compute, "grad_reduce_in_fp32": False})
    detail = f"weights, gradients and optimizer state are {compute}, nothing is FP32"
    builder.without_masters(name, word, detail)
    return builder.finish("true")


def import_sharded(builder: ImportBuilder, name: str, plan: str, compute: str) -> ImportReport:
    """Return the import of mixed precision under a strategy that shards: half-precision weights over FP32 ones."""
    builder.map(name, **{compute: True, "params_dtype": compute})
    builder.fields["grad_reduce_in_fp32"] = False
    detail, remedy = (
        f"the {plan} strategy reduces gradients in {compute} ({VERSION})",
        "State grad_reduce_in_fp32=true.",
    )
    builder.report(f"{name}.reduce_dtype", compute, "implied default", detail, remedy)
    if compute == "fp16" and plan == "deepspeed":
        if not builder.fields.get("loss_scale") and "initial_loss_scale" not in builder.fields:
            detail = f"{VERSION} writes initial_scale_power 16, window 1000, hysteresis 2 and minimum 1"
            builder.implied("deepspeed.fp16.initial_scale_power", 16, detail, initial_loss_scale=65536.0)
    elif compute == "fp16":
        assume_torch_scaler(builder, TITLE)
    return builder.finish("megatron_o2" if plan == "deepspeed" else "fsdp_policy")


def import_plugin(builder: ImportBuilder, kind: str, given: Settings) -> ImportReport:
    """Return the import of a precision plugin, given its class and arguments."""
    if kind == "TransformerEnginePrecision":
        return _import_te_plugin(builder, given)
    if kind not in ("MixedPrecision", "HalfPrecision", "DoublePrecision", "Precision", "FSDPPrecision"):
        own = "that this bridge reads, and this one of Lightning's own is not"
        rule = f"must be a precision plugin {own if kind in UNREAD else OWN}"
        raise given.wrong("", rule, kind, "Convert its settings by hand")
    default = {"HalfPrecision": "16-true", "DoublePrecision": "64-true", "Precision": "32-true"}.get(kind)
    word = given.word("precision", tuple(PRECISIONS)) or default
    if word is None:
        raise given.wrong("precision", "must be given", None, "Write bf16-mixed or 16-mixed")
    compute, how = PRECISIONS[word]
    if how == "true":
        return import_true(builder, given.name("precision"), word, compute)
    scaler = _scaler(given)
    if kind == "FSDPPrecision":
        if scaler is not None:
            rule = "cannot be given: FSDPPrecision compares it with a class attribute and always raises"
            raise given.wrong("scaler", rule, "a scaler", "Drop it")
        return import_sharded(builder, given.name("precision"), "fsdp", compute)
    builder.map(given.name("precision"), **amp_fields(compute))
    if scaler is not None and compute != "fp16":
        raise given.wrong("scaler", "must not be given in BF16", "a scaler", "Drop it: BF16 needs no loss scale")
    odd = compute == "fp16" and import_scaler(builder, scaler or Settings({}, TITLE), TITLE)
    imported = builder.finish("fp32" if compute == "fp32" else "amp_o1")
    return replace(imported, recipe=None) if odd else imported


def _import_te_plugin(builder: ImportBuilder, given: Settings) -> ImportReport:
    compute = given.dtype("weights_dtype")
    if compute is None:
        raise given.wrong("weights_dtype", "must be given", None, "Write torch.bfloat16")
    builder.map(given.name("weights_dtype"), **{compute: True, "params_dtype": compute})
    for key in ("replace_layers", "fallback_compute_dtype"):
        value = given.values.get(key)
        same = key == "fallback_compute_dtype" and value is not None and given.dtype(key) == compute
        if value is not None and not same:
            builder.report(given.name(key), str(value), "unsupported", "a choice of modules", "Check it by hand.")
        elif same:
            builder.map(given.name(key))
    return import_te(builder, _recipe(given), compute, given.name("recipe"))


def _scaler(given: Settings) -> Settings | None:
    value = given.values.get("scaler")
    if value is None:
        return None
    made = instance(value)
    if made is not None or isinstance(value, Mapping):
        inner = made.arguments if made is not None else value.get("init_args", {})
    else:
        inner = {key: getattr(value, f"_{key}", None) for key in ("init_scale", "growth_interval", *SCALER_USUAL)}
    return Settings({} if inner is None else inner, TITLE, given.name("scaler"))


def _recipe(given: Settings) -> Settings:
    value = given.values.get("recipe")
    if value is None or isinstance(value, Mapping):
        return given.section("recipe")
    if type(value).__name__ != "DelayedScaling":
        rule = "must be None, a mapping or a DelayedScaling to be read"
        raise given.wrong("recipe", rule, type(value).__name__, "Name the scheme by hand: it is a fp8_recipe of ours")
    plain = {key: getattr(value, key, None) for key in (*DELAYED, "amax_compute_algo")}
    plain["fp8_format"] = getattr(getattr(value, "fp8_format", None), "name", None)
    return Settings(plain, TITLE, given.name("recipe"))


def import_te(builder: ImportBuilder, recipe: Settings, compute: str, name: str, *, said: str = "") -> ImportReport:
    """Map Transformer Engine's delayed scaling, the only recipe that can be written as data."""
    mode = {compute: True, "params_dtype": compute} if compute != "fp32" else {"fp32": True}
    fields: dict[str, Any] = {"fp8": "hybrid", "fp8_recipe": "delayed"}
    builder.fields |= mode | fields | {"grad_reduce_in_fp32": compute == "fp32"}
    if not recipe.values:
        builder.map(name, **mode, **fields)
    format_ = recipe.word("fp8_format", ("HYBRID", "E4M3"))
    if format_ is None:
        detail = "delayed scaling in this format is what Transformer Engine 2.20 has where none is given"
        builder.implied(recipe.name("fp8_format"), "HYBRID", detail)
    else:
        builder.map(recipe.name("fp8_format"), fp8=format_.lower())
    for key, (field, default) in DELAYED.items():
        value = recipe.whole(key, least=0 if key == "margin" else 1)
        builder.take(recipe.name(key), field, value, default, "in Transformer Engine 2.20")
    algorithm = recipe.word("amax_compute_algo", ("max", "most_recent"))
    setting = recipe.name("amax_compute_algo")
    builder.take(setting, "fp8_amax_compute_algo", algorithm, "max", "in Transformer Engine 2.20")
    for key, value in recipe.values.items():
        if key not in (*DELAYED, "amax_compute_algo", "fp8_format") and value is not None:
            detail = "Transformer Engine 2 swallows arguments it does not know, `interval` among them"
            builder.report(recipe.name(key), value, "dead knob", detail, "Drop it.")
    if compute == "fp32":
        return builder.finish("fp32")
    detail = f"weights are {compute} and the optimizer steps on them, without FP32 masters"
    builder.without_masters(name, said or compute, detail)
    return builder.finish("true")


def export_te(builder: ExportBuilder) -> ExportReport:
    """Return the export as a Transformer Engine plugin with a mapping for its recipe."""
    config, mode = builder.config, builder.config.mode
    recipe = {
        "fp8_format": str(config.fp8).upper(),
        "margin": config.fp8_margin,
        "amax_history_len": config.fp8_amax_history_len,
        "amax_compute_algo": config.fp8_amax_compute_algo,
    }
    arguments = {"weights_dtype": {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[mode], "recipe": recipe}
    builder.map(mode, "weights_dtype")
    if builder.values["params_dtype"] in (None, mode):
        builder.map("params_dtype", "weights_dtype")
    for field, key in (
        ("fp8", "fp8_format"),
        ("fp8_recipe", ""),
        ("fp8_margin", "margin"),
        ("fp8_amax_history_len", "amax_history_len"),
        ("fp8_amax_compute_algo", "amax_compute_algo"),
    ):
        builder.map(field, f"recipe.{key}".rstrip("."))
    if config.grad_reduce_in_fp32:
        detail = f"gradients of {mode} weights are {mode}"
        builder.report_if_stated("grad_reduce_in_fp32", "unsupported", detail, "Accept it, or train with Megatron.")
    else:
        builder.map("grad_reduce_in_fp32", "weights_dtype")
    detail = "the optimizer steps on the weights themselves, without FP32 masters"
    builder.report("params_dtype", "semantics", detail, "Use an optimizer with FP32 masters of its own.")
    report_no_scaler(builder, "the plugin has no scaler", "Prefer BF16 weights.")
    if not config.fp8_wgrad:
        builder.report("fp8_wgrad", "dead knob", "Transformer Engine 2.0 and later cannot turn it off", "Drop it.")
    return builder.finish({"plugins": [{"class_path": TE_PLUGIN, "init_args": arguments}]})
