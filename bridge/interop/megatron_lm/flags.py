"""Megatron-LM's command-line flags that bear on precision, as rows."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.errors import PrecisionTypeError
from bridge.interop.unsupported import Row
from bridge.precision.config import FIELD_DEFAULTS, MEGATRON_FIELDS
from bridge.registry.config import MixedPrecisionConfig

if TYPE_CHECKING:
    from bridge.interop.builders import ImportBuilder


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


FLAGS = (
    Flag(option="--bf16", field="bf16", kind="on"),
    Flag(option="--fp16", field="fp16", kind="on"),
    Flag(option="--fp8-format", field="fp8", also=("fp8",)),
    Flag(option="--fp8-e4m3", field="fp8", kind="on", sets="e4m3"),
    Flag(option="--fp8-hybrid", field="fp8", kind="on", sets="hybrid"),
    Flag(option="--fp8-recipe", field="fp8_recipe"),
    Flag(option="--fp8-margin", field="fp8_margin"),
    Flag(option="--fp8-amax-history-len", field="fp8_amax_history_len"),
    Flag(option="--fp8-amax-compute-algo", field="fp8_amax_compute_algo"),
    Flag(option="--no-fp8-wgrad", field="fp8_wgrad", kind="off", also=("--disable-fp8-wgrad",)),
    Flag(option="--fp8-wgrad", field="fp8_wgrad", kind="on"),
    Flag(option="--fp8-param-gather", field="fp8_param_gather", kind="on", also=("fp8_param",)),
    Flag(option="--first-last-layers-bf16", field="first_last_layers_bf16", kind="on"),
    Flag(option="--num-layers-at-start-in-bf16", field="num_layers_at_start_in_bf16"),
    Flag(option="--num-layers-at-end-in-bf16", field="num_layers_at_end_in_bf16"),
    Flag(option="--fp4-format", field="fp4", also=("fp4",)),
    Flag(option="--fp4-recipe", field="fp4_recipe"),
    Flag(option="--fp4-param-gather", field="fp4_param_gather", kind="on", also=("fp4_param",)),
    Flag(option="--reuse-grad-buf-for-mxfp8-param-ag", field="reuse_grad_buf_for_mxfp8_param_ag", kind="on"),
    Flag(option="--loss-scale", field="loss_scale"),
    Flag(option="--initial-loss-scale", field="initial_loss_scale"),
    Flag(option="--min-loss-scale", field="min_loss_scale"),
    Flag(option="--loss-scale-window", field="loss_scale_window"),
    Flag(option="--hysteresis", field="hysteresis"),
    Flag(
        option="--accumulate-allreduce-grads-in-fp32",
        field="grad_reduce_in_fp32",
        kind="on",
        also=("--fp32-allreduce", "grad_reduce_in_fp32"),
    ),
    Flag(option="--grad-reduce-in-bf16", field="grad_reduce_in_fp32", kind="off"),
    # Keys of `--yaml-cfg` files, which hold fields of TransformerConfig that have no flag.
    Flag(option="params_dtype", field="params_dtype"),
    Flag(option="pipeline_dtype", field="pipeline_dtype"),
    Flag(option="autocast_dtype", field="autocast_dtype"),
    Flag(option="enable_autocast", field="autocast_enabled", kind="on"),
    Flag(option="fp8_dot_product_attention", field="fp8_dot_product_attention", kind="on"),
    Flag(option="fp8_multi_head_attention", field="fp8_multi_head_attention", kind="on"),
    # Fields that Megatron's configs have and Megatron Bridge's class does not.
    Flag(option="--fp32-residual-connection", field="fp32_residual_connection", kind="on"),
    Flag(option="--attention-softmax-in-fp32", field="attention_softmax_in_fp32", kind="on"),
    Flag(option="--apply-query-key-layer-scaling", field="apply_query_key_layer_scaling", kind="on"),
    Flag(option="--disable-bf16-reduced-precision-matmul", field="disable_bf16_reduced_precision_matmul", kind="on"),
    Flag(option="--mamba-training-ssm-states-dtype", field="mamba_training_ssm_states_dtype"),
    Flag(option="--dsa-indexer-k-norm-fp32", field="dsa_indexer_k_norm_fp32", kind="on"),
    Flag(option="--use-precision-aware-optimizer", field="use_precision_aware_optimizer", kind="on"),
    Flag(option="--main-grads-dtype", field="main_grads_dtype"),
    Flag(option="--main-params-dtype", field="main_params_dtype"),
    Flag(option="--exp-avg-dtype", field="exp_avg_dtype"),
    Flag(option="--exp-avg-sq-dtype", field="exp_avg_sq_dtype"),
    Flag(option="--muon-fp32-matmul-prec", field="muon_fp32_matmul_prec"),
    Flag(
        option="--ddp-reduce-scatter-with-fp32-accumulation",
        field="reduce_scatter_with_fp32_accumulation",
        kind="on",
        also=("reduce_scatter_with_fp32_accumulation",),
    ),
    Flag(option="--megatron-fsdp-main-params-dtype", field="megatron_fsdp_main_params_dtype"),
    Flag(option="--megatron-fsdp-main-grads-dtype", field="megatron_fsdp_main_grads_dtype"),
    Flag(option="--megatron-fsdp-grad-comm-dtype", field="megatron_fsdp_grad_comm_dtype"),
    Flag(option="--keep-fp8-transpose-cache", field="keep_fp8_transpose_cache", kind="on"),
    Flag(option="--moe-router-dtype", field="moe_router_dtype"),
    Flag(
        option="--moe-router-padding-for-quantization",
        field="moe_router_padding_for_quantization",
        kind="on",
        also=("--moe-router-padding-for-fp8",),
    ),
    Flag(option="--moe-dispatch-fwd-dtype", field="moe_dispatch_fwd_dtype"),
    Flag(option="--moe-combine-bwd-dtype", field="moe_combine_bwd_dtype"),
    Flag(option="--fp8-output-proj", field="fp8_output_proj", kind="on"),
    Flag(option="--fp8-quantizer-factory", field="fp8_quantizer_factory"),
    Flag(option="--fp4-quantizer-factory", field="fp4_quantizer_factory"),
)
"""Source: Megatron-LM 0.20 training/arguments.py and yaml_arguments.py; `sets`: its releases before 0.4."""


NOTHING = ("null", "auto")
"""Words that stand for no value: of argument files, and of Megatron-FSDP's flags."""


def dest(name: str) -> str:
    """Return the name of a flag in argparse's namespace and in argument files: "--fp8-recipe" -> "fp8_recipe"."""
    return name.lstrip("-").replace("-", "_")


BY_NAME = {dest(name): flag for flag in FLAGS for name in (flag.option, *flag.also)}

NEXT_TO_IT = "Set it on Megatron's own config, next to the recipe."
OTHER_SETTINGS = {
    dest(option): Row(**{"remedy": NEXT_TO_IT, **row})
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
"""Flags on which the meaning of others depends."""
ANY_SYSTEM = re.compile(
    r"amp|optim|deepspeed|fsdp|shard|strategy|adapter|load_in|quant|scal|transformer_engine|mcore|compile|backend|zero"
    r"|recipe|_target_|plugin|gpu|accelerator|distributed|version|cuda|16|model_type"
)
"""Keys that some system's precision depends on."""
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
