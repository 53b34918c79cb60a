"""Lightning's precision plugins: what each of them trains in, Transformer Engine's among them.

`TransformerEnginePrecision` takes a mapping, which can only be delayed scaling, or a recipe object, which no file can
hold. Its format is an enum's name, upper case; keys it does not know are swallowed.
Source: Lightning 2.6.6 fabric/plugins/precision, Transformer Engine 2.20 common/recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from bridge.interop.amp import amp_fields
from bridge.interop.lightning_instances import instance
from bridge.interop.scaler import assume_torch_scaler
from bridge.interop.settings import Settings
from bridge.precision.dtypes import dtype_token

if TYPE_CHECKING:
    from bridge.interop.contract import Exported, Imported
    from bridge.interop.ledger import Arrival, Departure

__all__ = ["PRECISIONS", "arrive_plugin", "arrive_sharded", "arrive_te", "arrive_true", "depart_te"]

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
"""What `Trainer(precision=)` takes, case and all -> dtype and kind."""
OWN = "of Lightning's own"
UNREAD = ("BitsandbytesPrecision", "DeepSpeedPrecision", "XLAPrecision")
"""Precision plugins of Lightning's own that are not read."""
SCALER_DEFAULTS = {"growth_factor": 2.0, "backoff_factor": 0.5, "enabled": True}
DELAYED = {"margin": ("fp8_margin", 0), "amax_history_len": ("fp8_amax_history_len", 1024)}
TE_PLUGIN = "lightning.pytorch.plugins.TransformerEnginePrecision"


def arrive_true(book: Arrival, name: str, word: str, compute: str) -> Imported:
    """Return the import of half-precision weights with nothing in FP32."""
    if compute == "fp64":
        detail = "FP64 throughout; FP32 was stated"
        book.fields["fp32"] = True
        book.lose(name, word, "unsupported", detail, "Megatron has no FP64 training.")
        return replace(book.close("fp32"), recipe=None)
    book.carry(name, **{compute: True, "params_dtype": compute, "grad_reduce_in_fp32": False})
    detail = f"weights, gradients and optimizer state are {compute}, nothing is FP32"
    book.lose(name, word, "semantics", detail, "Megatron keeps FP32 masters: plan 4 more bytes per weight.")
    return book.close("true")


def arrive_sharded(book: Arrival, name: str, plan: str, compute: str) -> Imported:
    """Return the import of mixed precision under a strategy that shards: half-precision weights over FP32 ones."""
    book.carry(name, **{compute: True, "params_dtype": compute})
    book.fields["grad_reduce_in_fp32"] = False
    detail = f"the {plan} strategy reduces gradients in {compute} ({VERSION})"
    book.lose(f"{name}.reduce_dtype", compute, "implied default", detail, "State grad_reduce_in_fp32=true for FP32.")
    if compute == "fp16" and plan == "deepspeed":
        if not book.fields.get("loss_scale") and "initial_loss_scale" not in book.fields:
            book.fields["initial_loss_scale"] = 65536.0
            detail = f"{VERSION} writes initial_scale_power 16, window 1000, hysteresis 2 and minimum 1"
            book.lose("deepspeed.fp16.initial_scale_power", 16, "implied default", detail, "State initial_loss_scale.")
    elif compute == "fp16":
        assume_torch_scaler(book, TITLE)
    return book.close("megatron_o2" if plan == "deepspeed" else "fsdp_policy")


def arrive_plugin(book: Arrival, kind: str, given: Settings) -> Imported:
    """Return the import of a precision plugin, given its class and arguments."""
    if kind == "TransformerEnginePrecision":
        return _arrive_te_plugin(book, given)
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
        return arrive_true(book, given.name("precision"), word, compute)
    scaler = _scaler(given)
    if kind == "FSDPPrecision":
        if scaler is not None:
            rule = "cannot be given: FSDPPrecision compares it with a class attribute and always raises"
            raise given.wrong("scaler", rule, "a scaler", "Drop it")
        return arrive_sharded(book, given.name("precision"), "fsdp", compute)
    book.carry(given.name("precision"), **amp_fields(compute))
    if scaler is not None and compute != "fp16":
        raise given.wrong("scaler", "must not be given in BF16", "a scaler", "Drop it: BF16 needs no loss scale")
    if compute == "fp16":
        taken = []
        for key, field in (("init_scale", "initial_loss_scale"), ("growth_interval", "loss_scale_window")):
            value = None if scaler is None else scaler.number(key, least=0)
            if scaler is not None and value is not None:
                book.carry(scaler.name(key), **{field: value})
                taken.append(field)
        assume_torch_scaler(book, TITLE, given=tuple(taken))
    if scaler is not None and _is_odd(book, scaler):
        return replace(book.close("amp_o1"), recipe=None)
    return book.close("fp32" if compute == "fp32" else "amp_o1")


def _is_odd(book: Arrival, scaler: Settings) -> bool:
    """Report settings of a scaler that Megatron's has not; return whether there are any."""
    odd = False
    for key, usual in SCALER_DEFAULTS.items():
        value = scaler.values.get(key)
        if value is not None and value != usual:
            odd = True
            detail = f"Megatron's scaler has no such setting and acts as with {usual}"
            book.lose(scaler.name(key), value, "unsupported", detail, "Set it in the program.")
        elif value is not None:
            book.carry(scaler.name(key))
    return odd


def _arrive_te_plugin(book: Arrival, given: Settings) -> Imported:
    compute = _dtype(given, "weights_dtype")
    if compute is None:
        raise given.wrong("weights_dtype", "must be given", None, "Write torch.bfloat16")
    book.carry(given.name("weights_dtype"), **{compute: True, "params_dtype": compute})
    for key in ("replace_layers", "fallback_compute_dtype"):
        value = given.values.get(key)
        same = key == "fallback_compute_dtype" and value is not None and _dtype(given, key) == compute
        if value is not None and not same:
            book.lose(given.name(key), str(value), "unsupported", "a choice of modules", "Check it by hand.")
        elif same:
            book.carry(given.name(key))
    return arrive_te(book, _recipe(given), compute, given.name("recipe"))


def _scaler(given: Settings) -> Settings | None:
    value = given.values.get("scaler")
    if value is None:
        return None
    made = instance(value)
    if made is not None or isinstance(value, Mapping):
        inner = made.arguments if made is not None else value.get("init_args", {})
    else:
        inner = {key: getattr(value, f"_{key}", None) for key in ("init_scale", "growth_interval", *SCALER_DEFAULTS)}
    return Settings({} if inner is None else inner, TITLE, given.name("scaler"))


def _dtype(given: Settings, key: str) -> str | None:
    value = given.values.get(key)
    if value is None:
        return None
    try:
        compute = dtype_token(value)
    except ValueError:
        compute = "?"
    if compute not in ("bf16", "fp16", "fp32"):
        raise given.wrong(key, "must be torch.bfloat16, torch.float16 or torch.float32", value, "Use torch.bfloat16")
    return compute


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


def arrive_te(book: Arrival, recipe: Settings, compute: str, name: str, *, said: str = "") -> Imported:
    """Carry Transformer Engine's delayed scaling, the only recipe that can be written as data."""
    mode = {compute: True, "params_dtype": compute} if compute != "fp32" else {"fp32": True}
    book.fields |= mode
    format_ = recipe.word("fp8_format", ("HYBRID", "E4M3"))
    book.fields |= {
        "fp8": (format_ or "HYBRID").lower(),
        "fp8_recipe": "delayed",
        "grad_reduce_in_fp32": compute == "fp32",
    }
    if format_ is not None:
        book.carry(recipe.name("fp8_format"), fp8=format_.lower())
    else:
        detail = "delayed scaling in this format is what Transformer Engine 2.20 has where none is given"
        book.lose(recipe.name("fp8_format"), "HYBRID", "implied default", detail, "Write it down to be sure.")
    if not recipe.values:
        book.carry(name, **mode, fp8="hybrid", fp8_recipe="delayed")
    for key, (field, default) in DELAYED.items():
        value = recipe.whole(key, least=0 if key == "margin" else 1)
        if value is not None:
            book.carry(recipe.name(key), **{field: value})
            continue
        book.fields[field] = default
        book.lose(
            recipe.name(key), default, "implied default", "in Transformer Engine 2.20", "Write it down to be sure."
        )
    algorithm = recipe.word("amax_compute_algo", ("max", "most_recent"))
    book.fields["fp8_amax_compute_algo"] = algorithm or "max"
    if algorithm:
        book.carry(recipe.name("amax_compute_algo"), fp8_amax_compute_algo=algorithm)
    else:
        detail, key = "in Transformer Engine 2.20", recipe.name("amax_compute_algo")
        book.lose(key, "max", "implied default", detail, "Write it down to be sure.")
    for key, value in recipe.values.items():
        if key not in (*DELAYED, "amax_compute_algo", "fp8_format") and value is not None:
            detail = "Transformer Engine 2 swallows arguments it does not know, `interval` among them"
            book.lose(recipe.name(key), value, "dead knob", detail, "Drop it.")
    detail = f"weights are {compute} and the optimizer steps on them, without FP32 masters"
    if compute == "fp32":
        return book.close("fp32")
    book.lose(name, said or compute, "semantics", detail, "Megatron keeps FP32 masters: plan 4 more bytes per weight.")
    return book.close("true")


def depart_te(book: Departure) -> Exported:
    """Return the export as a Transformer Engine plugin with a mapping for its recipe."""
    config, mode = book.config, book.config.mode
    recipe = {
        "fp8_format": str(config.fp8).upper(),
        "margin": config.fp8_margin,
        "amax_history_len": config.fp8_amax_history_len,
        "amax_compute_algo": config.fp8_amax_compute_algo,
    }
    arguments = {"weights_dtype": {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[mode], "recipe": recipe}
    book.carry(mode, "weights_dtype")
    book.carry("params_dtype", "weights_dtype") if book.values["params_dtype"] in (None, mode) else None
    for field, key in (
        ("fp8", "fp8_format"),
        ("fp8_recipe", ""),
        ("fp8_margin", "margin"),
        ("fp8_amax_history_len", "amax_history_len"),
        ("fp8_amax_compute_algo", "amax_compute_algo"),
    ):
        book.carry(field, f"recipe.{key}".rstrip("."))
    if config.grad_reduce_in_fp32:
        detail = f"gradients of {mode} weights are {mode}"
        book.lose_if_stated("grad_reduce_in_fp32", "unsupported", detail, "Accept it, or train with Megatron.")
    else:
        book.carry("grad_reduce_in_fp32", "weights_dtype")
    detail = "the optimizer steps on the weights themselves, without FP32 masters"
    book.lose("params_dtype", "semantics", detail, "Use an optimizer with FP32 masters of its own.")
    for field in ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
        if config.fp16 and field in config.stated and book.values[field] is not None:
            book.lose(field, "unsupported", "the plugin has no scaler", "Prefer BF16 weights.")
    if not config.fp8_wgrad:
        book.lose("fp8_wgrad", "dead knob", "Transformer Engine 2.0 and later cannot turn it off", "Drop it.")
    return book.close({"plugins": [{"class_path": TE_PLUGIN, "init_args": arguments}]})
