"""`START_ROWS`: the values that Megatron-LM sets when a run starts, its parser's defaults and derived values.

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
from bridge.model.hybrid_pattern import HybridPattern
from bridge.model.layout import ParallelLayout
from bridge.preflight.file_reading import MODE_REASON
from bridge.read.startup_rows import (
    StartupRow,
    StartupSettings,
    is_megatron_fsdp,
    make_startup_rows,
)
from bridge.read.tokenizers import find_vocab_size
from bridge.target.fields import parse_integer

ARGUMENT_SECTION = "argument"
"""Section of the arguments that are no field of a config."""
ARGUMENTS_SOURCE = "training/arguments.py"
VALIDATE_SOURCE = f"{ARGUMENTS_SOURCE}: validate_args"


def _get_mode(start: StartupSettings) -> str:
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


def _turns_reduction_on(start: StartupSettings) -> bool:
    """Return whether the parser turns FP32 reduction on."""
    return bool(
        start.value("model.bf16")
        and not start.value("ddp.use_torch_fsdp2")
        and start.stated("ddp.grad_reduce_in_fp32") is None
        and start.value("optimizer.main_grads_dtype") == "fp32"
    )


def _uses_local_attention(start: StartupSettings) -> bool:
    """Return whether Megatron's own attention runs, which alone reads some settings."""
    return str(start.value("model.transformer_impl")) == "local"


def _has_emerging_optimizer(start: StartupSettings) -> bool:
    """Return whether the optimizer is none that the distributed optimizer of Megatron Core shards."""
    return start.value("optimizer.optimizer") not in ("adam", "sgd")


def _is_swiglu(start: StartupSettings) -> bool:
    is_gated = bool(start.value("model.gated_linear_unit"))
    return is_gated and str(start.value("model.activation_func")) == "silu"


def _is_interleaved(start: StartupSettings) -> bool:
    """Return whether a stage has several chunks, by the field, a custom layout, or a hybrid model's pattern."""
    try:
        return ParallelLayout.from_model(start.sections.get("model") or {}).virtual > 1
    except RunConfigError:  # which the plan raises again, with its reason
        return False


def _count_chunks(start: StartupSettings) -> int | None:
    """Return the model chunks of a stage by `--num-layers-per-virtual-pipeline-stage`; None without it."""
    layers_of_chunk = parse_integer(
        start.value(f"{ARGUMENT_SECTION}.num_layers_per_virtual_pipeline_stage")
    )
    layers = parse_integer(start.value("model.num_layers"))
    if not layers_of_chunk or not layers:
        return None
    parts = layers
    for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        if start.value(f"model.{name}"):
            parts += 1
    return parts // start.size("pipeline_model_parallel_size") // layers_of_chunk or None


def _count_pattern_layers(start: StartupSettings) -> int:
    """Return the number of layers of a hybrid model's pattern, 0 where no pattern is stated."""
    pattern = _parse_pattern(start)
    if pattern is None:
        return 0
    return len(pattern.layers)


def _count_pattern_depths(start: StartupSettings) -> int:
    """Return the prediction depths of a hybrid model's pattern, 0 where no pattern is stated."""
    pattern = _parse_pattern(start)
    if pattern is None:
        return 0
    return pattern.depths


def _parse_pattern(start: StartupSettings) -> HybridPattern | None:
    if not _get_pattern_text(start):
        return None
    return HybridPattern.from_model(start.sections["model"])


def _get_pattern_text(start: StartupSettings) -> str:
    return start.value("model.hybrid_layer_pattern") or ""


def _has_bias_fusion(start: StartupSettings) -> bool:
    """Return whether the bias is fused with the activation, by the parser's two switches."""
    if _is_swiglu(start):
        return start.value(f"{ARGUMENT_SECTION}.bias_swiglu_fusion") is not False
    has_biases = bool(start.value("model.add_bias_linear"))
    return has_biases and start.value(f"{ARGUMENT_SECTION}.bias_gelu_fusion") is not False


def _find_vocab_size(start: StartupSettings) -> int | None:
    """Return the vocabulary of the run's tokenizer by its name or its type; None where neither is known."""
    size = find_vocab_size(start.value(f"{ARGUMENT_SECTION}.tokenizer_model"))
    if size is None:
        size = find_vocab_size(start.value(f"{ARGUMENT_SECTION}.tokenizer_type"))
    return size


def _make_optimizer_and_ddp_values(name: str, value: Any) -> dict[str, Any]:
    """Return the values of a field that the optimizer and DDP hold."""
    return {f"optimizer.{name}": value, f"ddp.{name}": value}


_make_default_rows = partial(
    make_startup_rows, because="the default of its parser", source=ARGUMENTS_SOURCE, is_default=True
)
"""A default of the parser that is not that of the class."""
_make_rows = partial(make_startup_rows, source=VALIDATE_SOURCE)
"""Values that `validate_args` derives."""
_make_pattern_rows = partial(_make_rows, because="hybrid_layer_pattern")

START_ROWS: tuple[StartupRow, ...] = (
    *_make_default_rows(
        {
            "model.position_embedding_type": "learned_absolute",
            "model.share_embeddings_and_output_weights": True,
        }
    ),
    *_make_default_rows(
        {"model.attention_softmax_in_fp32": False, "model.masked_softmax_fusion": True},
        _uses_local_attention,
    ),
    *_make_default_rows(
        {"model.q_lora_rank": None, "model.kv_lora_rank": 32}, "model.multi_latent_attention"
    ),
    *_make_default_rows({"ddp.check_for_nan_in_grad": True}),
    *_make_default_rows(
        {"optimizer.fp8_recipe": "delayed"},
        lambda start: start.value("model.fp8") or start.value("model.fp4"),
    ),
    *_make_default_rows(
        {"optimizer.optimizer_offload_fraction": 1.0}, "optimizer.optimizer_cpu_offload"
    ),
    *_make_default_rows(
        {"model.vocab_size": _find_vocab_size},
        lambda start: _find_vocab_size(start) is not None,
        because="the published vocabulary of the tokenizer's name, of which the tokenizer may "
        "lack 0.5 %",
    ),
    *_make_pattern_rows({"model.num_layers": _count_pattern_layers}, _count_pattern_layers),
    *_make_pattern_rows({"model.mtp_num_layers": _count_pattern_depths}, _count_pattern_depths),
    *_make_pattern_rows(
        {"model.multi_latent_attention": True},
        lambda start: set("+D") & set(_get_pattern_text(start)),
    ),
    *_make_pattern_rows(
        {"model.experimental_attention_variant": "dsa"},
        lambda start: "D" in _get_pattern_text(start),
    ),
    *_make_rows(
        {"model.virtual_pipeline_model_parallel_size": _count_chunks},
        lambda start: (_count_chunks(start) or 1) > 1,
        because="num_layers_per_virtual_pipeline_stage",
    ),
    *_make_default_rows(
        {"model.deallocate_pipeline_outputs": True},
        lambda start: start.size("pipeline_model_parallel_size") > 1,
    ),
    *_make_default_rows({"model.overlap_p2p_comm": True}, _is_interleaved),
    *_make_rows(
        {"model.overlap_p2p_comm": False},
        lambda start: not _is_interleaved(start),
        because="the schedule is not interleaved",
    ),
    *_make_rows({"model.batch_p2p_comm": False}, "model.overlap_p2p_comm"),
    *_make_rows(
        _make_optimizer_and_ddp_values("use_distributed_optimizer", True)
        | _make_optimizer_and_ddp_values("reuse_grad_buf_for_mxfp8_param_ag", False),
        is_megatron_fsdp,
        because="use_megatron_fsdp",
    ),
    *make_startup_rows(
        {
            "ddp.megatron_fsdp_use_decoupled_grad": lambda start: start.value(
                "optimizer.use_precision_aware_optimizer"
            )
        },
        is_megatron_fsdp,
        because="use_megatron_fsdp and use_precision_aware_optimizer",
        source="training/training.py: get_megatron_ddp_config",
    ),
    *_make_rows({"model.params_dtype": _get_mode}, because=MODE_REASON, is_default=True),
    *_make_rows(
        dict.fromkeys(
            ("optimizer.params_dtype", "model.pipeline_dtype"),
            lambda start: start.value("model.params_dtype"),
        ),
        because=MODE_REASON,
        is_default=True,
    ),
    *_make_rows(
        {"ddp.check_for_nan_in_grad": False, "train.check_for_nan_in_loss": False},
        lambda start: start.value("model.fp16") and not start.value("optimizer.loss_scale"),
        because="the loss scale is dynamic",
    ),
    *_make_rows(
        {"ddp.grad_reduce_in_fp32": True},
        lambda start: _turns_reduction_on(start) and not is_megatron_fsdp(start),
        because="bf16",
    ),
    *_make_rows(
        {"ddp.grad_reduce_in_fp32": True},
        lambda start: _turns_reduction_on(start) and is_megatron_fsdp(start),
        because="bf16; Megatron-FSDP reads it before megatron-core 0.19 alone",
    ),
    *_make_rows({"ddp.reduce_scatter_with_fp32_accumulation": False}, "ddp.grad_reduce_in_fp32"),
    *_make_rows(
        {"model.ffn_hidden_size": lambda start: start.size("hidden_size") * 8 // 3 // 64 * 64},
        lambda start: _is_swiglu(start) and start.stated("model.hidden_size"),
        because="swiglu",
        is_default=True,
    ),
    *_make_rows(
        {"model.sequence_parallel": False},
        lambda start: start.size("tensor_model_parallel_size") == 1,
        because="tensor_model_parallel_size=1",
    ),
    *_make_rows({"model.add_qkv_bias": True}, "model.add_bias_linear", because="biases"),
    *_make_rows(
        {"model.bias_activation_fusion": _has_bias_fusion},
        because="the default of its parser",
        is_default=True,
    ),
    *_make_rows({"model.attention_softmax_in_fp32": True}, "model.apply_query_key_layer_scaling"),
    *_make_rows({"model.cpu_offloading": True}, "model.cpu_offloading_num_layers"),
    *_make_rows(
        {"optimizer.use_layer_wise_distributed_optimizer": True},
        lambda start: (
            _has_emerging_optimizer(start) and start.value("optimizer.use_distributed_optimizer")
        ),
        because="the optimizer",
    ),
    *_make_rows(
        _make_optimizer_and_ddp_values("use_distributed_optimizer", False),
        _has_emerging_optimizer,
        because="the optimizer",
    ),
)


def select_rows(sections: Mapping[str, Any]) -> list[StartupRow]:
    """Return the rows of a run with these sections; one that trains nothing has no optimizer."""
    return [row for row in START_ROWS if row.path.partition(".")[0] in sections]


def describe_open_settings(own_fields: Mapping[str, Any], gpus: int | None) -> Iterator[str]:
    """Yield what the arguments leave open, as sentences that begin with the setting."""
    yield "model.vocab_size: the tokenizer decides it. Add model.vocab_size=VALUE."
    ranks = own_fields.get(f"{ARGUMENT_SECTION}.world_size")
    if gpus is None and ranks is not None:
        rule = f"the run has {ranks}, and no target states it"
        yield f"The number of GPUs: {rule}. Add --target h100x{ranks}, for example."
    elif gpus is None:
        yield (
            "The number of GPUs: the file does not state it; "
            "the least that the parallel sizes need is assumed."
        )
