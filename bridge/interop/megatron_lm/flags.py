"""Megatron-LM's command-line flags that bear on precision, as rows."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import PrecisionTypeError
from bridge.interop.builders import ImportBuilder
from bridge.interop.unsupported import Row
from bridge.precision.config import FIELD_DEFAULTS, FIELDS, MEGATRON_FIELDS
from bridge.precision.fields import KEY
from bridge.registry.config import MixedPrecisionConfig


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag that has a field."""

    option: str
    field: str
    kind: str = "value"
    """on (takes nothing, sets true), off (takes nothing, sets false), value."""
    also: tuple[str, ...] = ()
    """Other spellings, and the keys of argument files."""
    sets: object = None
    """The value that a flag of older releases stands for."""


def dest(name: str) -> str:
    """Return the name of a flag in argparse's namespace and in argument files: "--fp8-recipe" -> "fp8_recipe"."""
    return name.lstrip("-").replace("-", "_")


OWN_NAMES = (
    Flag(option="--fp8-format", field="fp8", also=("fp8",)),
    Flag(option="--fp8-e4m3", field="fp8", kind="on", sets="e4m3"),
    Flag(option="--fp8-hybrid", field="fp8", kind="on", sets="hybrid"),
    Flag(option="--no-fp8-wgrad", field="fp8_wgrad", kind="off", also=("--disable-fp8-wgrad",)),
    Flag(option="--fp8-param-gather", field="fp8_param_gather", kind="on", also=("fp8_param",)),
    Flag(option="--fp4-format", field="fp4", also=("fp4",)),
    Flag(option="--fp4-param-gather", field="fp4_param_gather", kind="on", also=("fp4_param",)),
    Flag(
        option="--accumulate-allreduce-grads-in-fp32",
        field="grad_reduce_in_fp32",
        kind="on",
        also=("--fp32-allreduce", "grad_reduce_in_fp32"),
    ),
    Flag(option="--grad-reduce-in-bf16", field="grad_reduce_in_fp32", kind="off"),
    Flag(option="enable_autocast", field="autocast_enabled", kind="on"),
    Flag(
        option="--ddp-reduce-scatter-with-fp32-accumulation",
        field="reduce_scatter_with_fp32_accumulation",
        kind="on",
        also=("reduce_scatter_with_fp32_accumulation",),
    ),
    Flag(
        option="--moe-router-padding-for-quantization",
        field="moe_router_padding_for_quantization",
        kind="on",
        also=("--moe-router-padding-for-fp8",),
    ),
)
"""Flags of another name than their field's, or of several."""


def _named_like_their_field() -> Iterator[Flag]:
    others = {flag.field for flag in OWN_NAMES} - {"fp8_wgrad"}  # whose flag of its own name is of older releases
    for name, field in FIELDS.items():
        if field.flag is not None and name not in others:
            option = name if field.flag == KEY else f"--{name.replace('_', '-')}"
            yield Flag(option=option, field=name, kind="on" if isinstance(field.default, bool) else "value")


FLAGS = (*_named_like_their_field(), *OWN_NAMES)
"""Source: Megatron-LM 0.20 training/arguments.py and yaml_arguments.py; `sets`: its releases before 0.4."""


NOTHING = ("null", "auto")
"""Words that stand for no value: of argument files, and of Megatron-FSDP's flags."""


BY_NAME = {dest(name): flag for flag in FLAGS for name in (flag.option, *flag.also)}

OTHER_SETTINGS = {
    dest(option): Row(**{"remedy": "Set it on Megatron's own config, next to the recipe.", **row})
    for option, row in json.loads(Path(__file__).with_name("other_settings.json").read_text("utf-8")).items()
}
"""Source: Megatron-LM 0.20 training/arguments.py, and DeepSpeed's runtime/config.py."""

SWITCH = re.compile(
    r"--(?:(?:use|disable|enable|overlap|untie|reset|apply)-.+|no-(?!rope-freq|weight-decay-cond-type).+"
    r"|log-(?!(?:memory-)?interval).+|swiglu|squared-relu|sequence-parallel|group-query-attention|qk-layernorm|mock-data"
    r"|moe-(?:grouped-gemm|permute-fusion|router-pre-softmax|router-fusion)|manual-gc|add-qkv-bias|async-save"
    r"|recompute-activations|attention-softmax-in-fp32|calculate-per-token-loss|deterministic-mode|finetune|eod-mask-loss)"
)
"""Flags that take no value, whether they bear on precision or not: an unknown word behind one is a word of its own."""
LOOKS_LIKE_PRECISION = re.compile(
    r"fp8|fp4|fp16|bf16|fp32|fp64|tf32|bfloat|float(?:16|32|8)|half|dtype|precision|loss_scale|amax|mxfp|nvfp|hysteresis"
    r"|grad_reduce_in|quantiz|query_key_layer"
)
DECIDES = re.compile(r"use_distributed_optimizer|fsdp|deepspeed|transformer_impl")
ANY_SYSTEM = re.compile(
    r"amp|optim|deepspeed|fsdp|shard|strategy|adapter|load_in|quant|scal|transformer_engine|mcore|compile|backend|zero"
    r"|recipe|_target_|plugin|gpu|accelerator|distributed|version|cuda|16|model_type"
)
NOT_PRECISION = frozenset(
    {
        "log_loss_scale_to_tensorboard",
        "no_log_loss_scale_to_tensorboard",
        "disable_log_loss_scale_to_tensorboard",
        "no_query_key_layer_scaling",
        "no_fp16_check",
    }
)


def may_repeat(key: str) -> bool:
    """Return whether a key of a configuration file may stand twice: it bears on no precision, in no system."""
    if key.startswith("--"):
        name = dest(key)
        return not (bears_on_precision(key) or name in BY_NAME or name in OTHER_SETTINGS or DECIDES.search(name))
    return not (bears_on_precision(key) or ANY_SYSTEM.search(key.lower()))


def report_other(builder: ImportBuilder, where: str, key: str, value: object) -> None:
    """Map a setting of a model's section that has a field or is at its default; report another one of a precision."""
    flag, row = BY_NAME.get(key), OTHER_SETTINGS.get(key)
    if flag is not None and flag.field in MEGATRON_FIELDS and value is not None and not is_default(flag.field, value):
        builder.map(where, **{flag.field: value})
        return
    if flag is not None:
        builder.map(where)
        return
    if row is None and not bears_on_precision(key.lower()):
        return
    if value in (None, False, *(row.harmless if row else ())):
        builder.map(where)
    else:
        detail = row.detail if row else "a setting of the model that no recipe has"
        builder.report(where, value, "unsupported", detail, "Keep it in the model's configuration.")


def is_default(field: str, value: object) -> bool:
    """Return whether a value of a setting says no more than an unstated field does: off, or Megatron's default."""
    if value is None or value in NOTHING:
        return FIELD_DEFAULTS[field] is None
    if value is False:
        return True
    try:
        return bool(MixedPrecisionConfig.from_dict({field: value}).reading(field) == FIELD_DEFAULTS[field])
    except PrecisionTypeError:
        return False


def bears_on_precision(name: str) -> bool:
    """Return whether a flag or key that no row knows looks as if it bore on precision."""
    key = dest(name)
    return LOOKS_LIKE_PRECISION.search(key) is not None and key not in NOT_PRECISION
