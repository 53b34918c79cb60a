"""`START_ROWS`: the values that Megatron-LM sets when a run starts.

They are defaults of its parser that differ from those of Megatron Core's classes, and values that
`validate_args` derives. The rows are applied in the order of `validate_args`, since a later row may
read the value of an earlier row. A setting that changes no plan, no bytes, no dimension and no
finding has no row.

Source: Megatron-LM of 2026-08-22, training/arguments.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from bridge.errors import RunConfigError
from bridge.model.hybrid_pattern import HybridPattern
from bridge.model.layout import ParallelLayout, read_parallel_layout
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
WORLD_SIZE_KEY = f"{ARGUMENT_SECTION}.world_size"
ARGUMENTS_SOURCE = "training/arguments.py"
VALIDATE_SOURCE = f"{ARGUMENTS_SOURCE}: validate_args"
GPUS_WITHOUT_TARGET = (
    "The number of GPUs: the run has {ranks}, and no target states it. "
    "Add --target h100x{ranks}, for example."
)
TOO_FEW_GPUS = (
    "The number of GPUs: the run has {ranks}, and no target states it. The layout needs a multiple "
    "of {least}: with {ranks} Megatron stops at the start. Add --target h100x{counted}, for example."
)
GPUS_NOT_STATED = (
    "The number of GPUs: the file does not state it; "
    "the least that the parallel sizes need is assumed."
)


def _get_mode(settings: StartupSettings) -> str:
    """Return the mode of the run's precision, or the mode of the arguments for a run without a precision."""
    precision = settings.sections.get("mixed_precision")
    if isinstance(precision, Mapping):
        for name in ("fp16", "bf16"):
            if precision.get(name):
                return name
        return "fp32"
    for name in ("fp16", "bf16"):
        if settings.value(f"model.{name}"):
            return name
    return "fp32"


def _turns_reduction_on(settings: StartupSettings) -> bool:
    """Return whether the parser turns reduction of gradients in FP32 on."""
    return bool(
        settings.value("model.bf16")
        and not settings.value("ddp.use_torch_fsdp2")
        and settings.stated("ddp.grad_reduce_in_fp32") is None
        and settings.value("optimizer.main_grads_dtype") == "fp32"
    )


def _uses_local_attention(settings: StartupSettings) -> bool:
    """Return whether Megatron's own attention runs. Some settings are read only by it."""
    return str(settings.value("model.transformer_impl")) == "local"


def _has_emerging_optimizer(settings: StartupSettings) -> bool:
    """Return whether the optimizer is one that the distributed optimizer of Megatron Core does not shard."""
    return settings.value("optimizer.optimizer") not in ("adam", "sgd")


def _is_swiglu(settings: StartupSettings) -> bool:
    """Return whether the MLP has a gated SiLU activation."""
    is_gated = bool(settings.value("model.gated_linear_unit"))
    return is_gated and str(settings.value("model.activation_func")) == "silu"


def _is_interleaved(settings: StartupSettings) -> bool:
    """Return whether a stage has several chunks, by the field, a custom layout, or a hybrid model's pattern.

    A layout that is refused counts as not interleaved.
    """
    try:
        return ParallelLayout.from_model(settings.sections.get("model") or {}).virtual > 1
    except RunConfigError:  # the plan raises it again
        return False


def _count_chunks(settings: StartupSettings) -> int | None:
    """Return the model chunks of a stage by `--num-layers-per-virtual-pipeline-stage`; None without it.

    The embedding and the loss count as a layer each if the pipeline is split so.
    """
    layers_of_chunk = parse_integer(
        settings.value(f"{ARGUMENT_SECTION}.num_layers_per_virtual_pipeline_stage")
    )
    layers = parse_integer(settings.value("model.num_layers"))
    if not layers_of_chunk or not layers:
        return None
    parts = layers
    for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        if settings.value(f"model.{name}"):
            parts += 1
    return parts // settings.size("pipeline_model_parallel_size") // layers_of_chunk or None


def _count_pattern_layers(settings: StartupSettings) -> int:
    """Return the number of layers of a hybrid model's pattern; 0 if no pattern is stated."""
    pattern = _parse_pattern(settings)
    if pattern is None:
        return 0
    return len(pattern.layers)


def _count_pattern_depths(settings: StartupSettings) -> int:
    """Return the prediction depths of a hybrid model's pattern; 0 if no pattern is stated."""
    pattern = _parse_pattern(settings)
    if pattern is None:
        return 0
    return pattern.depths


def _parse_pattern(settings: StartupSettings) -> HybridPattern | None:
    """Return the pattern of a hybrid model; None if no pattern is stated."""
    if not _get_pattern_text(settings):
        return None
    return HybridPattern.from_model(settings.sections["model"])


def _get_pattern_text(settings: StartupSettings) -> str:
    """Return the text of a hybrid model's pattern; empty if no pattern is stated."""
    return settings.value("model.hybrid_layer_pattern") or ""


def _has_bias_fusion(settings: StartupSettings) -> bool:
    """Return whether the bias is fused with the activation.

    The parser has a switch of it for SwiGLU, and another one for GELU with biases.
    """
    if _is_swiglu(settings):
        return settings.value(f"{ARGUMENT_SECTION}.bias_swiglu_fusion") is not False
    has_biases = bool(settings.value("model.add_bias_linear"))
    return has_biases and settings.value(f"{ARGUMENT_SECTION}.bias_gelu_fusion") is not False


def _find_vocab_size(settings: StartupSettings) -> int | None:
    """Return the vocabulary size of the run's tokenizer, by its name or its type; None if neither is known."""
    size = find_vocab_size(settings.value(f"{ARGUMENT_SECTION}.tokenizer_model"))
    if size is None:
        size = find_vocab_size(settings.value(f"{ARGUMENT_SECTION}.tokenizer_type"))
    return size


def _find_padded_vocab_size(settings: StartupSettings) -> int | None:
    """Return the size that a fork pads the vocabulary to, whatever the tokenizer.

    It is None if no option states it.
    """
    return parse_integer(settings.value(f"{ARGUMENT_SECTION}.pad_vocab_size_to"))


def _compute_swiglu_size(settings: StartupSettings) -> int:
    """Return the default FFN size of SwiGLU: 8/3 of the hidden size, rounded down to a multiple of 64.

    The three matrices of SwiGLU have as many parameters as two matrices of 4 times the hidden size.
    """
    return settings.size("hidden_size") * 8 // 3 // 64 * 64


def _make_optimizer_and_ddp_values(name: str, value: object) -> dict[str, object]:
    """Return the same value for the optimizer's field and DDP's field of a name."""
    return {f"optimizer.{name}": value, f"ddp.{name}": value}


_make_default_rows = partial(
    make_startup_rows, because="the default of its parser", source=ARGUMENTS_SOURCE, is_default=True
)
"""Makes rows of the parser's defaults."""
_make_rows = partial(make_startup_rows, source=VALIDATE_SOURCE)
"""Makes rows of values that `validate_args` derives."""
_make_pattern_rows = partial(_make_rows, because="hybrid_layer_pattern")
"""Makes rows of values that the pattern of a hybrid model decides."""

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
        lambda settings: settings.value("model.fp8") or settings.value("model.fp4"),
    ),
    *_make_default_rows(
        {"optimizer.optimizer_offload_fraction": 1.0}, "optimizer.optimizer_cpu_offload"
    ),
    *make_startup_rows(
        {"model.vocab_size": _find_padded_vocab_size},
        lambda settings: _find_padded_vocab_size(settings) is not None,
        because="pad_vocab_size_to",
        source="megatron/tokenizer/tokenizer.py: _vocab_size_with_padding "
        "(bigscience-workshop/Megatron-DeepSpeed 0671c79d)",
        is_default=True,
        set_by="BigScience's Megatron-DeepSpeed",
    ),
    *_make_default_rows(
        {"model.vocab_size": _find_vocab_size},
        lambda settings: _find_vocab_size(settings) is not None,
        because="the published vocabulary of the tokenizer's name, of which the tokenizer may "
        "lack 0.5 %",
    ),
    *_make_pattern_rows({"model.num_layers": _count_pattern_layers}, _count_pattern_layers),
    *_make_pattern_rows({"model.mtp_num_layers": _count_pattern_depths}, _count_pattern_depths),
    *_make_pattern_rows(
        {"model.multi_latent_attention": True},
        lambda settings: set("+D") & set(_get_pattern_text(settings)),
    ),
    *_make_pattern_rows(
        {"model.experimental_attention_variant": "dsa"},
        lambda settings: "D" in _get_pattern_text(settings),
    ),
    *_make_rows(
        {"model.virtual_pipeline_model_parallel_size": _count_chunks},
        lambda settings: (_count_chunks(settings) or 1) > 1,
        because="num_layers_per_virtual_pipeline_stage",
    ),
    *make_startup_rows(
        {"model.deallocate_pipeline_outputs": True},
        lambda settings: settings.size("pipeline_model_parallel_size") > 1,
        because="whatever the arguments say",
        source=f"{ARGUMENTS_SOURCE}: core_transformer_config_from_args",
    ),
    *_make_default_rows({"model.overlap_p2p_comm": True}, _is_interleaved),
    *_make_rows(
        {"model.overlap_p2p_comm": False},
        lambda settings: not _is_interleaved(settings),
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
            "ddp.megatron_fsdp_use_decoupled_grad": lambda settings: settings.value(
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
            lambda settings: settings.value("model.params_dtype"),
        ),
        because=MODE_REASON,
        is_default=True,
    ),
    *_make_rows(
        {"ddp.check_for_nan_in_grad": False, "train.check_for_nan_in_loss": False},
        lambda settings: (
            settings.value("model.fp16") and not settings.value("optimizer.loss_scale")
        ),
        because="the loss scale is dynamic",
    ),
    *_make_rows(
        {"ddp.grad_reduce_in_fp32": True},
        lambda settings: _turns_reduction_on(settings) and not is_megatron_fsdp(settings),
        because="bf16",
    ),
    *_make_rows(
        {"ddp.grad_reduce_in_fp32": True},
        lambda settings: _turns_reduction_on(settings) and is_megatron_fsdp(settings),
        because="bf16; Megatron-FSDP reads it before megatron-core 0.19 alone",
    ),
    *_make_rows({"ddp.reduce_scatter_with_fp32_accumulation": False}, "ddp.grad_reduce_in_fp32"),
    *_make_rows(
        {"model.ffn_hidden_size": _compute_swiglu_size},
        lambda settings: _is_swiglu(settings) and settings.stated("model.hidden_size"),
        because="swiglu",
        is_default=True,
    ),
    *_make_rows(
        {"model.sequence_parallel": False},
        lambda settings: settings.size("tensor_model_parallel_size") == 1,
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
        lambda settings: (
            _has_emerging_optimizer(settings)
            and settings.value("optimizer.use_distributed_optimizer")
        ),
        because="the optimizer",
    ),
    *_make_rows(
        _make_optimizer_and_ddp_values("use_distributed_optimizer", False),
        _has_emerging_optimizer,
        because="the optimizer",
    ),
)


def select_rows(sections: Mapping[str, object]) -> list[StartupRow]:
    """Return the rows of a run with these sections.

    A run that trains nothing has no section of an optimizer, and so no row of it.
    """
    return [row for row in START_ROWS if row.path.partition(".")[0] in sections]


def find_stated_ranks(own_fields: Mapping[str, object]) -> int | None:
    """Return the number of ranks that arguments state; None if they do not state it.

    Args:
        own_fields: Dotted key of an argument that is no field of a config -> its value.
    """
    ranks = parse_integer(own_fields.get(WORLD_SIZE_KEY))
    if ranks is None or ranks < 1:
        return None
    return ranks


def describe_open_settings(
    own_fields: Mapping[str, object], model: Mapping[str, object], gpus: int | None
) -> Iterator[str]:
    """Yield sentences about settings that the arguments do not decide. Each begins with the setting.

    Args:
        own_fields: Dotted key of an argument that is no field of a config -> its value.
        model: The section of the model.
        gpus: GPUs of the run's target; None if no target is stated.
    """
    yield "model.vocab_size: the tokenizer decides it. Add model.vocab_size=VALUE."
    if gpus is not None:
        return
    ranks = find_stated_ranks(own_fields)
    if ranks is None:
        yield GPUS_NOT_STATED
        return
    layout, _ = read_parallel_layout(model)
    least = layout.fit_to_world_size(None).world_size
    counted = layout.fit_to_world_size(ranks).world_size
    if counted == ranks:
        yield GPUS_WITHOUT_TARGET.format(ranks=ranks)
    else:
        yield TOO_FEW_GPUS.format(ranks=ranks, least=least, counted=counted)
