"""The model: its config, and Megatron's `GPTModel` in wrappers for precision and data parallelism.

A run calls `adapt_config`, which turns off what this machine cannot run, and then `build_gpt`.
"""

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
from bridge.runtime.megatron.backend import LOCAL_BACKEND, Backend
from bridge.runtime.megatron.cpu.cuda_shim import has_cuda
from bridge.runtime.megatron.emulation.emulated_model import emulate_low_layers, store_low_weights
from bridge.runtime.megatron.emulation.fp8_regions import attach_delayed_updates
from bridge.runtime.megatron.emulation.parallel_linear import get_layer_scheme
from bridge.runtime.megatron.hybrid.model import build_hybrid
from bridge.runtime.megatron.model.initial_weights import draw_weights, mark_weights
from bridge.runtime.megatron.model.layer_spec import build_block_spec, build_mtp_spec
from bridge.runtime.megatron.patching import Patch, apply_patches, keep_compatible
from bridge.runtime.megatron.process.training_process import release_chunk_at_end
from bridge.runtime.megatron.without_te import CHANGES_FOR_CONFIGS

ACTIVATIONS = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "squared_relu": squared_relu,
    "quick_gelu": quick_gelu,
}
"""Names that `activation_func` accepts; it also accepts a function."""


@dataclass
class GPTConfig(MLATransformerConfig):  # type: ignore[misc]  # Megatron is untyped
    """`TransformerConfig` with the further arguments of `GPTModel` and of latent attention.

    The arguments have Megatron's names. The defaults are the defaults of `TransformerConfig`. The
    fields that `MLATransformerConfig` adds have its defaults, and are read only with
    `multi_latent_attention`.
    """

    multi_latent_attention: bool = False
    """Whether queries, keys and values are projected through a latent of lower rank."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """LayerNorm or RMSNorm."""
    q_lora_rank: int | None = 512
    """Width of the latent of queries. None: no latent."""
    rope_type: Literal["rope", "yarn"] = "yarn"
    """Rotary embedding of latent attention."""
    vocab_size: int | None = None
    """Tokens of the vocabulary before padding. None: the vocabulary of the data."""
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
    """A letter per layer of a hybrid model: M Mamba, * attention, - MLP, E experts."""
    hybrid_override_pattern: str | None = None
    """The older name of `hybrid_layer_pattern`."""
    share_embeddings_and_output_weights: bool = False
    """Whether the output head uses the embedding's weights."""

    def __post_init__(self) -> None:
        config: Any = self
        activation = config.activation_func
        if isinstance(activation, str):
            if activation not in ACTIVATIONS:
                names = ", ".join(ACTIVATIONS)
                raise RunConfigError.of(
                    "model.activation_func",
                    f"must be one of {names} or a function",
                    activation,
                    "Choose one of them.",
                )
            config.activation_func = ACTIVATIONS[activation]
        if config.hybrid_layer_pattern or config.hybrid_override_pattern:
            config.is_hybrid_model = True
        with warnings.catch_warnings(), apply_patches(keep_compatible(CHANGES_FOR_CONFIGS)):
            # Megatron warns about values that are its defaults.
            warnings.filterwarnings("ignore", message="full scope is deprecated")
            warnings.filterwarnings("ignore", message="moe_ffn_hidden_size is not set")
            if config.multi_latent_attention:
                super().__post_init__()
            else:  # MLATransformerConfig's checks refuse valid fields of other attention
                super(MLATransformerConfig, self).__post_init__()


_CUDA_ONLY_SWITCHES = {
    "bias_activation_fusion": "the fusion is compiled for CUDA",
    "bias_dropout_fusion": "the fusion is compiled for CUDA",
    "cross_entropy_loss_fusion": "the fusion is compiled for CUDA",
    "apply_rope_fusion": "the kernel is Transformer Engine's",
}
"""Switch that is turned off without CUDA -> the reason."""
_SWITCH_EXTENSIONS = {
    "gradient_accumulation_fusion": "fused_weight_gradient_mlp_cuda",
    "masked_softmax_fusion": "scaled_masked_softmax_cuda",
    "persist_layer_norm": "apex",
}
"""Switch -> the compiled extension that Megatron's local layers need for it.

The output layer is Megatron's under each backend, with Transformer Engine too.
"""


def adapt_config(config: Any, *, vocab_size: int, backend: str = "local") -> tuple[Any, list[str]]:
    """Return a copy of a model config that runs on this machine, and sentences about the changes.

    No field of the precision is changed.

    Args:
        config: The model config.
        vocab_size: Vocabulary of the data.
        backend: The backend of the low-precision GEMMs.

    Raises:
        RunConfigError: The vocabulary of the data is larger than the vocabulary of the config.
    """
    config = copy.copy(config)
    if config.vocab_size is None:
        config.vocab_size = vocab_size
    elif config.vocab_size < vocab_size:
        raise RunConfigError.of(
            "model.vocab_size",
            f"must be at least the data's vocabulary of {vocab_size}",
            config.vocab_size,
            "Leave it at None to take the data's.",
        )
    changes = []
    for switch, reason in _list_unusable_switches(backend).items():
        if getattr(config, switch):
            setattr(config, switch, False)
            changes.append(f"model.{switch}=False ({reason})")
    if not changes:
        return config, []
    return config, [f"Changed for this machine: {'; '.join(changes)}."]


def _list_unusable_switches(backend: str) -> dict[str, str]:
    """Return the switches of a model config that this machine cannot turn on -> the reason."""
    reasons: dict[str, str] = {}
    if not has_cuda():
        reasons.update(_CUDA_ONLY_SWITCHES)
    for switch, module in _SWITCH_EXTENSIONS.items():
        if not has_cuda() or importlib.util.find_spec(module) is None:
            reasons[switch] = f"its kernel needs {module}, which is not installed here"
    if backend in ("local", "emulated"):
        reasons["moe_grouped_gemm"] = (
            "the kernel is Transformer Engine's; experts multiply one after the other"
        )
    return reasons


def compute_padded_vocab_size(config: Any) -> int:
    """Return the rows of the embedding: the vocabulary, padded so that all ranks have equal parts."""
    multiple = int(config.make_vocab_size_divisible_by) * int(config.tensor_model_parallel_size)
    return -(-int(config.vocab_size) // multiple) * multiple


def build_gpt(
    config: Any,
    ddp: Any,
    device: torch.device,
    *,
    seed: int,
    backend: Backend = LOCAL_BACKEND,
    phases: Sequence[Any] = (),
) -> list[Any]:
    """Build this rank's part of the model: a `DistributedDataParallel` per chunk.

    Megatron's schedules take the chunks in this form. Inside of it, in FP16 and BF16, Megatron's
    `Float16Module` casts the weights.

    Args:
        config: The result of `adapt_config`.
        ddp: DDP config.
        device: Device of the weights.
        seed: Seed of the weights, which are equal in every parallel layout.
        backend: The implementation of the linear layers.
        phases: Model configs of the phases of a precision schedule.

    Raises:
        RunConfigError: This Megatron Core cannot build the model.
    """
    if backend.name in ("te", "te_cpu"):
        _refuse_nvfp4_buffers(config, ddp)
    chunks = config.virtual_pipeline_model_parallel_size
    stages: list[int | None] = [None]
    if chunks is not None:
        stages = list(range(chunks))
    models = []
    for stage in stages:
        model = _build_chunk(
            config,
            ddp,
            device,
            seed=seed,
            backend=backend,
            vp_stage=stage,
            phases=phases,
        )
        models.append(model)
    wrapped = []
    for index, model in enumerate(models):
        # As in Megatron-LM, only the first chunk has buckets: the reduction of the other chunks overlaps
        # with the backward pass of the chunks before them anyway.
        chunk = DistributedDataParallel(
            config=config, ddp_config=copy.copy(ddp), module=model, disable_bucketing=index > 0
        )
        wrapped.append(chunk)
    for chunk in wrapped:
        _index_bucket_parameters(chunk)
        release_chunk_at_end(chunk)
    return wrapped


def _index_bucket_parameters(chunk: Any) -> None:
    """Give each bucket the positions of its parameters in the buffer.

    megatron-core 0.16.1 counts the positions without the gaps by which the distributed optimizer
    aligns parameters to 64 elements (distributed/param_and_grad_buffer.py:106-110). With weights in
    MXFP8, every parameter after a gap is then copied from a wrong position after each step.
    Megatron-LM's pull request 3007 corrects it.
    """
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        for bucket in buffer.buckets:
            for parameter in bucket.params:
                start, end, _ = buffer.param_index_map[parameter]
                bucket.param_to_index[parameter] = (start - bucket.offset, end - bucket.offset)


def _refuse_nvfp4_buffers(config: Any, ddp: Any) -> None:
    """Refuse stored NVFP4 weights of Transformer Engine that Megatron's buffers cannot hold.

    The buffers have a byte per element, and Transformer Engine packs two codes into a byte.

    Source: megatron-core 0.16.1 distributed/param_and_grad_buffer.py:828. 0.17.1 has
        `fp4_param_gather` for such weights.
    """
    is_fp4 = getattr(config, "fp4", None) and get_layer_scheme(config)
    is_packed = is_fp4 and getattr(config, "fp4_param", False)
    if is_packed and ddp.use_distributed_optimizer and not hasattr(ddp, "fp4_param_gather"):
        raise RunConfigError(
            "model.fp4_param: this Megatron Core cannot keep Transformer Engine's NVFP4 weights in "
            "the buffers of the distributed optimizer, got True. "
            "Set mixed_precision.fp4_param_gather=false, or "
            "optimizer.use_distributed_optimizer=false."
        )


def _make_model_arguments(config: Any, vp_stage: int | None) -> dict[str, Any]:
    """Return the arguments that a GPT and a hybrid model have in common."""
    is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    return {
        "config": config,
        "vocab_size": compute_padded_vocab_size(config),
        "max_sequence_length": config.seq_length,
        "pre_process": is_first,
        "post_process": is_last,
        "parallel_output": True,
        "share_embeddings_and_output_weights": config.share_embeddings_and_output_weights,
        "position_embedding_type": config.position_embedding_type,
        "rotary_percent": config.rotary_percent,
        "rotary_base": config.rotary_base,
    }


def _build_chunk(
    config: Any,
    ddp: Any,
    device: torch.device,
    *,
    seed: int,
    backend: Backend,
    vp_stage: int | None,
    phases: Sequence[Any],
) -> torch.nn.Module:
    """Build a chunk of the model: its layers, their emulation, the weights, and the 16-bit module.

    The arguments are the arguments of `build_gpt`, and the number of the chunk in an interleaved
    pipeline.
    """
    arguments = _make_model_arguments(config, vp_stage)
    model: torch.nn.Module
    recipe: Any = getattr(config, "quant_recipe", None)
    chunk_recipe: list[Patch] = []
    if vp_stage is not None and hasattr(recipe, "of_chunk"):
        chunk_recipe = [(config, "quant_recipe", recipe.of_chunk(vp_stage))]
    # Megatron reads the recipe from the config while it builds the layers, and so does the emulation.
    with mark_weights(config) as marks, apply_patches(chunk_recipe):
        if config.is_hybrid_model:
            model = build_hybrid(backend=backend.name, **arguments)
        else:
            model = GPTModel(
                transformer_layer_spec=build_block_spec(
                    config, backend=backend.name, vp_stage=vp_stage
                ),
                mtp_block_spec=build_mtp_spec(config, backend=backend.name, vp_stage=vp_stage),
                vp_stage=vp_stage,
                **arguments,
            )
        model = model.to(device)
        if backend.name == "emulated":
            emulate_low_layers(model, config, phases, backend.backward_override)
    draw_weights(model, marks, seed=seed)
    if config.fp16 or config.bf16:
        model = Float16Module(config, model)
    if backend.name == "emulated":
        # After the weights are drawn and cast: codes are made from their final values.
        store_low_weights(model, config, ddp)
        attach_delayed_updates(model, config)
    return model


def count_parameters(model: list[Any]) -> int:
    """Return the number of values of the whole model, over tensor-parallel shards and stages.

    This is a collective call. A parameter of which several ranks have a copy (norms under tensor
    parallelism, tied embeddings under pipeline parallelism) counts once. Each expert-parallel rank
    has different experts, and all of them count.

    Args:
        model: Chunks of this rank.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    parameters: list[torch.nn.Parameter] = []
    for chunk in model:
        parameters.extend(chunk.parameters())
    dense_values, expert_values = 0, 0
    for parameter in parameters:
        is_counted_here = rank == 0 or getattr(parameter, "tensor_model_parallel", False)
        if not getattr(parameter, "allreduce", True):  # Megatron's mark of a routed expert
            expert_values += parameter.numel()
        elif is_counted_here and not getattr(parameter, "shared", False):
            dense_values += parameter.numel()
    device = parameters[0].device
    dense_group = parallel_state.get_model_parallel_group()
    expert_group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    total = _sum_over_group(dense_values, dense_group, device)
    return total + _sum_over_group(expert_values, expert_group, device)


def _sum_over_group(number: int, group: Any, device: torch.device) -> int:
    """Return the sum of a number over the ranks of a group in a collective call."""
    total = torch.tensor(number, dtype=torch.int64, device=device)
    torch.distributed.all_reduce(total, group=group)
    return int(total)


def list_bucket_groups(model: list[Any]) -> list[Any]:
    """Return the bucket groups of model chunks, in which gradients are reduced and weights gathered."""
    groups: list[Any] = []
    for chunk in model:
        groups.extend(chunk.bucket_groups)
        groups.extend(chunk.expert_parallel_bucket_groups)
    return groups


def unwrap_model(module: Any) -> Any:
    """Return the `GPTModel` inside DistributedDataParallel and Float16Module."""
    while isinstance(module, (DistributedDataParallel, Float16Module)):
        module = module.module
    return module
