"""The model: its config, and Megatron's `GPTModel` built from it, wrapped for mixed precision and data parallelism."""

import copy
import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 torch's own abbreviation
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.module import Float16Module

from bridge.errors import RunConfigError
from bridge.runtime.megatron.device import has_cuda
from bridge.runtime.megatron.emulation.linear import scheme_of
from bridge.runtime.megatron.emulation.model import emulate, prepare_emulation
from bridge.runtime.megatron.hybrid.model import build_hybrid
from bridge.runtime.megatron.initial_weights import draw_weights, marked_weights
from bridge.runtime.megatron.layer_spec import block_spec, mtp_spec
from bridge.runtime.megatron.process import release_at_end
from bridge.runtime.megatron.replacement import fitting, replaced
from bridge.runtime.megatron.without_te import OF_CONFIGS

ACTIVATIONS = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "squared_relu": squared_relu,
    "quick_gelu": quick_gelu,
}
"""Names that `activation_func` accepts as well as a function."""


@dataclass
class GPTConfig(MLATransformerConfig):  # type: ignore[misc]  # Megatron is untyped
    """`TransformerConfig` with the further arguments of `GPTModel`, under Megatron's names, and of latent attention.

    Defaults are those of `TransformerConfig`; the fields that `MLATransformerConfig` adds have its own, and are read
    with `multi_latent_attention` only.
    """

    multi_latent_attention: bool = False
    """Whether queries, keys and values are projected through a latent of lower rank."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """LayerNorm or RMSNorm."""
    q_lora_rank: int | None = 512
    """Width of the latent of queries; None: queries are projected at once."""
    rope_type: Literal["rope", "yarn"] = "yarn"
    """Rotary embedding of latent attention."""
    vocab_size: int | None = None
    """Tokens of the vocabulary before padding; None: the data's."""
    seq_length: int = 256
    """Tokens per sample."""
    make_vocab_size_divisible_by: int = 128
    """The embedding's rows are padded to a multiple of this times the tensor-parallel size."""
    position_embedding_type: str = "rope"
    """learned_absolute, rope or none."""
    rotary_base: int = 10000
    """Base of the rotary frequencies."""
    rotary_percent: float = 1.0
    """Part of each head that is rotated."""
    hybrid_layer_pattern: str | None = None
    """A letter for each layer of a hybrid model: M for Mamba, * for attention, - for an MLP, E for experts."""
    hybrid_override_pattern: str | None = None
    """The older name of the same."""
    share_embeddings_and_output_weights: bool = False
    """Whether the output head uses the embedding's weights."""

    def __post_init__(self) -> None:
        config: Any = self
        activation = config.activation_func
        if isinstance(activation, str):
            if activation not in ACTIVATIONS:
                rule = f"must be one of {', '.join(ACTIVATIONS)} or a function"
                raise RunConfigError.of(
                    "model.activation_func", rule, activation, "Choose one of them."
                )
            config.activation_func = ACTIVATIONS[activation]
        if config.hybrid_layer_pattern or config.hybrid_override_pattern:
            config.is_hybrid_model = True
        with warnings.catch_warnings(), replaced(fitting(OF_CONFIGS)):
            # Megatron's own defaults trip over a deprecation of its own.
            warnings.filterwarnings("ignore", message="full scope is deprecated")
            warnings.filterwarnings("ignore", message="moe_ffn_hidden_size is not set")
            if config.multi_latent_attention:
                super().__post_init__()
            else:  # the checks of latent attention refuse fields that other attention has
                super(MLATransformerConfig, self).__post_init__()


_WITHOUT_CUDA = {
    "bias_activation_fusion": "the fusion is compiled for CUDA",
    "bias_dropout_fusion": "the fusion is compiled for CUDA",
    "cross_entropy_loss_fusion": "the fusion is compiled for CUDA",
    "apply_rope_fusion": "the kernel is Transformer Engine's",
}
"""Switch that is off without CUDA, and why."""
_EXTENSIONS = {
    "gradient_accumulation_fusion": "fused_weight_gradient_mlp_cuda",
    "masked_softmax_fusion": "scaled_masked_softmax_cuda",
    "persist_layer_norm": "apex",
}
"""Switch -> the compiled extension that it needs where Transformer Engine is not used."""


def run_config(config: Any, *, vocab_size: int, backend: str = "local") -> tuple[Any, list[str]]:
    """Return a copy of a model config that runs on this machine, and a sentence that names the fields it changed.

    No precision field is touched. RunConfigError where the data's vocabulary, `vocab_size`, is larger than its own.
    """
    config = copy.copy(config)
    if config.vocab_size is None:
        config.vocab_size = vocab_size
    elif config.vocab_size < vocab_size:
        rule, remedy = (
            f"must be at least the data's vocabulary of {vocab_size}",
            "Leave it at None to take the data's.",
        )
        raise RunConfigError.of("model.vocab_size", rule, config.vocab_size, remedy)
    off = {} if has_cuda() else dict(_WITHOUT_CUDA)
    for switch, module in _EXTENSIONS.items():
        if not has_cuda() or importlib.util.find_spec(module) is None:
            off[switch] = f"its kernel needs {module}, which is not installed here"
    if backend in ("local", "emulated"):
        off["moe_grouped_gemm"] = (
            "the kernel is Transformer Engine's; experts multiply one after the other"
        )
    changed = [switch for switch in off if getattr(config, switch)]
    for switch in changed:
        setattr(config, switch, False)
    named = "; ".join(f"model.{switch}=False ({off[switch]})" for switch in changed)
    return config, [f"Changed for this machine: {named}."] if changed else []


def padded_vocab_size(config: Any) -> int:
    """Return the rows of the embedding: the vocabulary, padded so that every tensor-parallel rank gets as many."""
    multiple = int(config.make_vocab_size_divisible_by) * int(config.tensor_model_parallel_size)
    return -(-int(config.vocab_size) // multiple) * multiple


def build_gpt(
    config: Any,
    ddp: Any,
    where: torch.device,
    *,
    seed: int,
    backend: str = "local",
    phases: Sequence[Any] = (),
) -> list[Any]:
    """Build this rank's part of the model: a `DistributedDataParallel` per chunk, as Megatron's schedules take them.

    `config` is the result of `run_config`, `backend` the name of one, and `phases` are the model configs of a precision
    schedule. Weights are cast by Megatron's `Float16Module`; from one seed they are the same in every parallel layout.
    """
    if backend in ("te", "te_cpu"):
        _require_te_storage(config, ddp)
    chunks = config.virtual_pipeline_model_parallel_size
    stages = [None] if chunks is None else list(range(chunks))
    models = [
        _build_chunk(config, ddp, where, seed=seed, backend=backend, vp_stage=stage, phases=phases)
        for stage in stages
    ]
    # Only the first chunk's buckets are reduced early: the others have nothing to overlap with in time.
    built = [
        DistributedDataParallel(
            config=config, ddp_config=copy.copy(ddp), module=model, disable_bucketing=index > 0
        )
        for index, model in enumerate(models)
    ]
    for chunk in built:
        _locate_parameters(chunk)
        release_at_end(chunk)
    return built


def _locate_parameters(chunk: Any) -> None:
    """Give each bucket the places of its parameters in the buffer.

    megatron-core 0.16.1 counts them without the gaps by which the distributed optimizer aligns parameters to 64
    elements (distributed/param_and_grad_buffer.py:106-110). Where weights are stored in MXFP8, every parameter behind
    one of another size is then copied from a wrong place after each step. Megatron-LM's pull request 3007 corrects it.
    """
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        for bucket in buffer.buckets:
            for parameter in bucket.params:
                start, end, _ = buffer.param_index_map[parameter]
                bucket.param_to_index[parameter] = (start - bucket.offset, end - bucket.offset)


def _require_te_storage(config: Any, ddp: Any) -> None:
    """Refuse NVFP4 weights that Megatron's buffers cannot hold: they count a byte per element, the codes are packed.

    Source: megatron-core 0.16.1 distributed/param_and_grad_buffer.py:828; 0.17.1 has `fp4_param_gather` for them.
    """
    is_packed = (
        getattr(config, "fp4", None) and scheme_of(config) and getattr(config, "fp4_param", False)
    )
    if is_packed and ddp.use_distributed_optimizer and not hasattr(ddp, "fp4_param_gather"):
        raise RunConfigError(
            "model.fp4_param: this Megatron Core cannot keep Transformer Engine's NVFP4 weights in the buffers of the "
            "distributed optimizer, got True. Set mixed_precision.fp4_param_gather=false, or "
            "optimizer.use_distributed_optimizer=false."
        )


def _build_chunk(
    config: Any,
    ddp: Any,
    where: torch.device,
    *,
    seed: int,
    backend: str,
    vp_stage: int | None,
    phases: Sequence[Any],
) -> torch.nn.Module:
    arguments: dict[str, Any] = {
        "config": config,
        "vocab_size": padded_vocab_size(config),
        "max_sequence_length": config.seq_length,
        "pre_process": parallel_state.is_pipeline_first_stage(
            ignore_virtual=False, vp_stage=vp_stage
        ),
        "post_process": parallel_state.is_pipeline_last_stage(
            ignore_virtual=False, vp_stage=vp_stage
        ),
        "parallel_output": True,
        "share_embeddings_and_output_weights": config.share_embeddings_and_output_weights,
        "position_embedding_type": config.position_embedding_type,
        "rotary_percent": config.rotary_percent,
        "rotary_base": config.rotary_base,
    }
    model: torch.nn.Module
    recipe: Any = getattr(config, "quant_recipe", None)
    has_chunks = vp_stage is not None and hasattr(recipe, "of_chunk")
    own = (
        [(config, "quant_recipe", recipe.of_chunk(vp_stage))] if has_chunks else []
    )  # while it is built and matched
    with marked_weights(config) as marks, replaced(own):
        if config.is_hybrid_model:
            model = build_hybrid(backend=backend, **arguments)
        else:
            model = GPTModel(
                transformer_layer_spec=block_spec(config, backend=backend, vp_stage=vp_stage),
                mtp_block_spec=mtp_spec(config, backend=backend, vp_stage=vp_stage),
                vp_stage=vp_stage,
                **arguments,
            )
        model = model.to(where)
        if backend == "emulated":
            emulate(model, config, phases)
    draw_weights(model, marks, seed=seed)
    if config.fp16 or config.bf16:
        model = Float16Module(config, model)
    if backend == "emulated":
        prepare_emulation(model, config, ddp)
    return model


def parameter_count(model: list[Any]) -> int:
    """Return the parameters of the whole model, summed over tensor-parallel shards and stages; a collective call.

    Parameters that several ranks hold a copy of (norms under TP, tied embeddings under PP) count once. Each
    expert-parallel rank holds experts of its own.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    dense = sum(
        parameter.numel()
        for parameter in parameters
        if getattr(parameter, "allreduce", True)
        and (rank == 0 or getattr(parameter, "tensor_model_parallel", False))
        and not getattr(parameter, "shared", False)
    )
    experts = sum(
        parameter.numel() for parameter in parameters if not getattr(parameter, "allreduce", True)
    )
    total, routed = (
        torch.tensor(own, dtype=torch.int64, device=parameters[0].device)
        for own in (dense, experts)
    )
    torch.distributed.all_reduce(total, group=parallel_state.get_model_parallel_group())
    torch.distributed.all_reduce(
        routed, group=parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    )
    return int(total) + int(routed)


def bucket_groups(model: list[Any]) -> list[Any]:
    """Return the groups of buckets in which the gradients and weights of model chunks are reduced and gathered."""
    return [
        group
        for chunk in model
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
    ]


def unwrapped(module: Any) -> Any:
    """Return the `GPTModel` inside DistributedDataParallel and Float16Module."""
    while isinstance(module, (DistributedDataParallel, Float16Module)):
        module = module.module
    return module
