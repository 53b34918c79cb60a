"""How the model of a Trainer's file is loaded: the dtype of its weights, the adapter that is trained, quantisation.

None of it is an argument of the Trainer. TRL, LLaMA-Factory, ms-swift and others write it into the same file, and it
decides what the Trainer's `bf16` amounts to: AMP over FP32 weights, an FP32 adapter over frozen BF16 weights, or BF16
throughout.
Source: TRL 1.9.2 trainer/model_config.py, LLaMA-Factory 0.9.5 hparams and model/adapter.py, ms-swift 4.6.0 arguments.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.interop.settings import half_or_fp32
from bridge.interop.unsupported import Row, report_row, rows

if TYPE_CHECKING:
    from bridge.interop.builders import ImportBuilder
    from bridge.interop.settings import Settings

__all__ = ["LOOKS_LIKE_PRECISION", "Loaded", "loaded", "report_model"]

VERSION = "transformers 5.23.0"
FACTORY = "LLaMA-Factory 0.9.5"
DTYPES = ("torch_dtype", "dtype", "model_dtype")
INNER = "model_init_kwargs"
NOT_ADAPTERS = ("full", "freeze", "none", "false", "")
QUANTISED = re.compile(
    r"load_in_[48]bit|bnb_4bit_\w+|use_bnb_nested_quant|double_quantization|hqq_axis|quant_(config|method|bits)"
    r"|(export_|ref_model_|reward_model_)?quantization_\w+"
)
SWITCHED_BY = ("load_in_8bit", "load_in_4bit", "quantization_bit", "quant_bits", "quant_method", "quantization_config")
"""Settings of which one has to be on for the options of a quantisation to be read."""
LOOKS_LIKE_PRECISION = re.compile(
    r"(^|_)(bf16|fp16|fp8|fp4|fp32|tf32|amp|nvfp4|mxfp[48])(_|$)|float\d|bfloat|(^|_)precision|dtype|quantiz|quant_"
    r"|autocast|upcast|\dbit|int[48](_|$)"
)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The dtype of the weights, as far as it is known."""

    dtype: str | None
    """fp32, bf16 or fp16; None: nothing says."""
    setting: str = "weights_dtype"
    """The setting that states it, or leaves it open."""
    value: object = None
    """The written value."""
    is_open: bool = False
    """`setting` says that the checkpoint decides, and that was reported."""
    adapter: str | None = None
    """The setting that has an adapter trained over frozen weights."""
    upcasts: bool = False
    """Trained weights are upcast to FP32 after loading."""


def loaded(builder: ImportBuilder, top: Settings, stated: str | None) -> Loaded:
    """Return what the weights are loaded in.

    Args:
        builder: Where what does not decide is reported; what does is left to the caller, who knows what became of it.
        top: The file.
        stated: What the caller's context says; it wins over the file.
    """
    adapter = _adapter(top)
    factory = top.given("finetuning_type")
    if factory and top.values.get("pure_bf16"):
        detail = f"{FACTORY} leaves what it trains as the checkpoint has it, BF16 being assumed, and upcasts nothing"
        remedy = "Pass weights_dtype if the checkpoint is not BF16."
        builder.report("pure_bf16", top["pure_bf16"], "semantics", detail, remedy)
        return Loaded(dtype=stated or "bf16", setting="pure_bf16", value=top["pure_bf16"])
    if "pure_bf16" in top:
        _report(builder, "pure_bf16", top["pure_bf16"], f"read by {FACTORY}, which needs finetuning_type too")
    setting, value = next(iter(_dtypes(top).items()), ("weights_dtype", None))
    upcasts = factory and stated is None and not top.values.get("use_badam")
    if value is None:
        return Loaded(dtype=stated, value=stated, adapter=adapter, upcasts=upcasts)
    dtype = half_or_fp32(value)
    if stated is not None and stated != dtype:
        detail = f"weights_dtype={stated} was passed and decides"
        builder.report(setting, value, "dead knob", detail, "Pass what the file says, or nothing.")
        return Loaded(dtype=stated, value=stated, adapter=adapter)
    if dtype is not None:
        return Loaded(dtype=dtype, setting=setting, value=value, adapter=adapter, upcasts=upcasts)
    if value == "auto":
        detail = "the checkpoint's own dtype, which no file but its own says; FP32 was assumed"
        remedy = "Pass weights_dtype=bf16 if that is what the checkpoint holds."
        builder.report(setting, value, "implied default", detail, remedy)
    else:
        detail = "not one of float32, bfloat16 and float16; FP32 was assumed"
        builder.report(setting, str(value), "unsupported", detail, "Pass weights_dtype with the dtype that is meant.")
    return Loaded(dtype=None, setting=setting, is_open=True, adapter=adapter, upcasts=upcasts)


def report_model(builder: ImportBuilder, top: Settings, model: Loaded, done: Collection[str]) -> None:
    """Report quantisation and whatever else than `done` looks like precision, none of which has a field."""
    said = list(_dtypes(top).items())
    for name, value in said if model.setting == "pure_bf16" else said[1:]:
        if half_or_fp32(value) == model.dtype:
            builder.map(name)
        else:
            builder.report(name, value, "dead knob", f"{model.setting} decides", "Keep one of them.")
    on = any(_is_on(top.values.get(name)) for name in SWITCHED_BY)
    for key, value in top.values.items():
        if value is None or key in done:
            continue
        row = rows("huggingface_model").get(key)
        if QUANTISED.fullmatch(key):
            _quantisation(builder, key, value, on=on)
        elif key != key.lower() and (key.lower() in {*done, *DTYPES} or LOOKS_LIKE_PRECISION.search(key.lower())):
            detail = "another letter case, which is not read"
            builder.report(key, value, "dead knob", detail, f"Write {key.lower()} if it is meant.")
        elif key == "infer_dtype":
            detail = f"{FACTORY} reads it where nothing is trained"
            builder.report(key, value, "dead knob", detail, "Nothing to do for training.")
        elif row is not None and not (key == INNER and isinstance(value, Mapping)):
            report_row(builder, key, value, row)
        elif isinstance(value, Mapping):
            _nested(builder, key, value)
        elif key not in DTYPES and LOOKS_LIKE_PRECISION.search(key):
            _report(builder, key, value, f"no argument of {VERSION}; another reader of this file decides")


def _dtypes(top: Settings) -> dict[str, Any]:
    """Return the settings that say a dtype, the one that decides first, with what they say."""
    inner = top.values.get(INNER)
    found = {name: top.values.get(name) for name in DTYPES}
    if isinstance(inner, Mapping):
        found |= {f"{INNER}.{name}": inner.get(name) for name in DTYPES}
    return {name: value for name, value in found.items() if value is not None}


def _adapter(top: Settings) -> str | None:
    if top.values.get("use_peft") is True:
        return "use_peft"
    for name in ("finetuning_type", "tuner_type", "train_type"):
        if str(top.values.get(name) or "").lower() not in NOT_ADAPTERS:
            return name
    return None


def _is_on(value: object) -> bool:
    return value is not None and value is not False and str(value).lower() not in ("none", "")


def _report(builder: ImportBuilder, name: str, value: object, detail: str) -> None:
    report_row(builder, name, value, Row(detail))


def _quantisation(builder: ImportBuilder, key: str, value: object, *, on: bool) -> None:
    if not _is_on(value):
        builder.map(key)
    elif key.startswith("export_"):
        detail = "how the finished model is quantised; a recipe is about training"
        builder.report(key, value, "unsupported", detail, "Quantise the finished model as you do today.")
    elif key.startswith(("ref_model_", "reward_model_")):
        _report(builder, key, value, "bits of a frozen model next to the trained one")
    elif key in SWITCHED_BY or key == "quant_config" or on:
        detail = "the frozen weights are stored in few bits"
        _report(builder, key, value, detail if key in SWITCHED_BY else f"{detail}, and this is an option of it")
    else:
        detail = "read where the model is loaded quantised, and nothing says that it is"
        builder.report(key, value, "dead knob", detail, "Drop it, or say in how many bits it is loaded.")


def _nested(builder: ImportBuilder, key: str, block: Mapping[Any, Any]) -> None:
    """Report what looks like precision inside a block that is not read here."""
    for name, value in block.items():
        if value is None or (key == INNER and name in DTYPES):
            continue
        if QUANTISED.fullmatch(str(name)) or LOOKS_LIKE_PRECISION.search(str(name)):
            _report(builder, f"{key}.{name}", value, f"no argument of {VERSION}; the reader of this block decides")
