"""`ROWS`: the values that Megatron-LM sets when a run starts, its parser's defaults and derived values.

A default has a row where it differs from that of Megatron Core's class. Rows are applied in order,
as `validate_args` works. Settings that change no plan, no bytes, no dimension and no finding have
no row.

Source: Megatron-LM of 2026-08-22, training/arguments.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from bridge.errors import RunConfigError
from bridge.model.hybrid import HybridPattern
from bridge.model.layout import Parallel
from bridge.preflight.file_reading import FROM_THE_MODE
from bridge.read.start import Row, Start, is_fsdp, rows
from bridge.read.tokenizers import vocab_size_of
from bridge.target.fields import whole_number

ARGUMENT = "argument"
"""Section of the arguments that are no field of a config."""
ARGUMENTS = "training/arguments.py"
VALIDATE = f"{ARGUMENTS}: validate_args"


def _mode(start: Start) -> str:
    """Return the mode of the precision that is written over the arguments, or that of the arguments."""
    precision = start.sections.get("mixed_precision")
    if isinstance(precision, Mapping):
        for name in ("fp16", "bf16"):
            if precision.get(name):
                return name
        return "fp32"
    for name in ("fp16", "bf16"):
        if start.value(f"model.{name}"):
            return name
    return "fp32"


def _turns_reduction_on(start: Start) -> bool:
    """Return whether the parser turns FP32 reduction on."""
    return bool(
        start.value("model.bf16")
        and not start.value("ddp.use_torch_fsdp2")
        and start.stated("ddp.grad_reduce_in_fp32") is None
        and start.value("optimizer.main_grads_dtype") == "fp32"
    )


def _is_local(start: Start) -> bool:
    """Return whether Megatron's own attention runs, which alone reads some settings."""
    return str(start.value("model.transformer_impl")) == "local"


def _is_emerging(start: Start) -> bool:
    """Return whether the optimizer is none that the distributed optimizer of Megatron Core shards."""
    return start.value("optimizer.optimizer") not in ("adam", "sgd")


def _is_swiglu(start: Start) -> bool:
    is_gated = bool(start.value("model.gated_linear_unit"))
    return is_gated and str(start.value("model.activation_func")) == "silu"


def _is_interleaved(start: Start) -> bool:
    """Return whether a stage has several chunks, by the field, a custom layout, or a hybrid model's pattern."""
    try:
        return Parallel.of(start.sections.get("model") or {}).virtual > 1
    except RunConfigError:  # which the plan raises again, with its reason
        return False


def _chunks(start: Start) -> int | None:
    """Return the model chunks of a stage by `--num-layers-per-virtual-pipeline-stage`; None without it."""
    layers_of_chunk = whole_number(start.value(f"{ARGUMENT}.num_layers_per_virtual_pipeline_stage"))
    layers = whole_number(start.value("model.num_layers"))
    if not layers_of_chunk or not layers:
        return None
    parts = layers
    for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        if start.value(f"model.{name}"):
            parts += 1
    return parts // start.size("pipeline_model_parallel_size") // layers_of_chunk or None


def _layers_of_pattern(start: Start) -> int:
    """Return the number of layers of a hybrid model's pattern, 0 where no pattern is stated."""
    pattern = _pattern(start)
    if pattern is None:
        return 0
    return len(pattern.layers)


def _depths_of_pattern(start: Start) -> int:
    """Return the prediction depths of a hybrid model's pattern, 0 where no pattern is stated."""
    pattern = _pattern(start)
    if pattern is None:
        return 0
    return pattern.depths


def _pattern(start: Start) -> HybridPattern | None:
    if not _letters(start):
        return None
    return HybridPattern.of(start.sections["model"])


def _letters(start: Start) -> str:
    return start.value("model.hybrid_layer_pattern") or ""


def _bias_fusion(start: Start) -> bool:
    """Return whether the bias is fused with the activation, by the parser's two switches."""
    if _is_swiglu(start):
        return start.value(f"{ARGUMENT}.bias_swiglu_fusion") is not False
    has_biases = bool(start.value("model.add_bias_linear"))
    return has_biases and start.value(f"{ARGUMENT}.bias_gelu_fusion") is not False


def _vocabulary(start: Start) -> int | None:
    """Return the vocabulary of the run's tokenizer by its name or its type; None where neither is known."""
    size = vocab_size_of(start.value(f"{ARGUMENT}.tokenizer_model"))
    if size is None:
        size = vocab_size_of(start.value(f"{ARGUMENT}.tokenizer_type"))
    return size


def _in_both(name: str, value: Any) -> dict[str, Any]:
    """Return the values of a field that the optimizer and DDP hold."""
    return {f"optimizer.{name}": value, f"ddp.{name}": value}


_default = partial(rows, because="the default of its parser", source=ARGUMENTS, is_default=True)
"""A default of the parser that is not that of the class."""
_set = partial(rows, source=VALIDATE)
"""Values that `validate_args` derives."""
_by_pattern = partial(_set, because="hybrid_layer_pattern")

ROWS: tuple[Row, ...] = (
    *_default(
        {
            "model.position_embedding_type": "learned_absolute",
            "model.share_embeddings_and_output_weights": True,
        }
    ),
    *_default(
        {"model.attention_softmax_in_fp32": False, "model.masked_softmax_fusion": True}, _is_local
    ),
    *_default(
        {"model.q_lora_rank": None, "model.kv_lora_rank": 32}, "model.multi_latent_attention"
    ),
    *_default({"ddp.check_for_nan_in_grad": True}),
    *_default(
        {"optimizer.fp8_recipe": "delayed"},
        lambda start: start.value("model.fp8") or start.value("model.fp4"),
    ),
    *_default({"optimizer.optimizer_offload_fraction": 1.0}, "optimizer.optimizer_cpu_offload"),
    *_default(
        {"model.vocab_size": _vocabulary},
        lambda start: _vocabulary(start) is not None,
        because="the published vocabulary of the tokenizer's name, of which the tokenizer may "
        "lack 0.5 %",
    ),
    *_by_pattern({"model.num_layers": _layers_of_pattern}, _layers_of_pattern),
    *_by_pattern({"model.mtp_num_layers": _depths_of_pattern}, _depths_of_pattern),
    *_by_pattern(
        {"model.multi_latent_attention": True}, lambda start: set("+D") & set(_letters(start))
    ),
    *_by_pattern(
        {"model.experimental_attention_variant": "dsa"}, lambda start: "D" in _letters(start)
    ),
    *_set(
        {"model.virtual_pipeline_model_parallel_size": _chunks},
        lambda start: (_chunks(start) or 1) > 1,
        because="num_layers_per_virtual_pipeline_stage",
    ),
    *_default(
        {"model.deallocate_pipeline_outputs": True},
        lambda start: start.size("pipeline_model_parallel_size") > 1,
    ),
    *_default({"model.overlap_p2p_comm": True}, _is_interleaved),
    *_set(
        {"model.overlap_p2p_comm": False},
        lambda start: not _is_interleaved(start),
        because="the schedule is not interleaved",
    ),
    *_set({"model.batch_p2p_comm": False}, "model.overlap_p2p_comm"),
    *_set(
        _in_both("use_distributed_optimizer", True)
        | _in_both("reuse_grad_buf_for_mxfp8_param_ag", False),
        is_fsdp,
        because="use_megatron_fsdp",
    ),
    *rows(
        {
            "ddp.megatron_fsdp_use_decoupled_grad": lambda start: start.value(
                "optimizer.use_precision_aware_optimizer"
            )
        },
        is_fsdp,
        because="use_megatron_fsdp and use_precision_aware_optimizer",
        source="training/training.py: get_megatron_ddp_config",
    ),
    *_set({"model.params_dtype": _mode}, because=FROM_THE_MODE, is_default=True),
    *_set(
        dict.fromkeys(
            ("optimizer.params_dtype", "model.pipeline_dtype"),
            lambda start: start.value("model.params_dtype"),
        ),
        because=FROM_THE_MODE,
        is_default=True,
    ),
    *_set(
        {"ddp.check_for_nan_in_grad": False, "train.check_for_nan_in_loss": False},
        lambda start: start.value("model.fp16") and not start.value("optimizer.loss_scale"),
        because="the loss scale is dynamic",
    ),
    *_set(
        {"ddp.grad_reduce_in_fp32": True},
        lambda start: _turns_reduction_on(start) and not is_fsdp(start),
        because="bf16",
    ),
    *_set(
        {"ddp.grad_reduce_in_fp32": True},
        lambda start: _turns_reduction_on(start) and is_fsdp(start),
        because="bf16; Megatron-FSDP reads it before megatron-core 0.19 alone",
    ),
    *_set({"ddp.reduce_scatter_with_fp32_accumulation": False}, "ddp.grad_reduce_in_fp32"),
    *_set(
        {"model.ffn_hidden_size": lambda start: start.size("hidden_size") * 8 // 3 // 64 * 64},
        lambda start: _is_swiglu(start) and start.stated("model.hidden_size"),
        because="swiglu",
        is_default=True,
    ),
    *_set(
        {"model.sequence_parallel": False},
        lambda start: start.size("tensor_model_parallel_size") == 1,
        because="tensor_model_parallel_size=1",
    ),
    *_set({"model.add_qkv_bias": True}, "model.add_bias_linear", because="biases"),
    *_set(
        {"model.bias_activation_fusion": _bias_fusion},
        because="the default of its parser",
        is_default=True,
    ),
    *_set({"model.attention_softmax_in_fp32": True}, "model.apply_query_key_layer_scaling"),
    *_set({"model.cpu_offloading": True}, "model.cpu_offloading_num_layers"),
    *_set(
        {"optimizer.use_layer_wise_distributed_optimizer": True},
        lambda start: _is_emerging(start) and start.value("optimizer.use_distributed_optimizer"),
        because="the optimizer",
    ),
    *_set(_in_both("use_distributed_optimizer", False), _is_emerging, because="the optimizer"),
)


def rows_of(sections: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a run with these sections; one that trains nothing has no optimizer."""
    return [row for row in ROWS if row.path.partition(".")[0] in sections]


def left_open(own_fields: Mapping[str, Any], gpus: int | None) -> Iterator[str]:
    """Yield what the arguments leave open, as sentences that begin with the setting."""
    yield "model.vocab_size: the tokenizer decides it. Add model.vocab_size=VALUE."
    ranks = own_fields.get(f"{ARGUMENT}.world_size")
    if gpus is None and ranks is not None:
        rule = f"the run has {ranks}, and no target states it"
        yield f"The number of GPUs: {rule}. Add --target h100x{ranks}, for example."
    elif gpus is None:
        yield (
            "The number of GPUs: the file does not state it; "
            "the least that the parallel sizes need is assumed."
        )
