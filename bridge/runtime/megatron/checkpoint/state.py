"""The state of a run as a checkpoint has it.

Each tensor is marked with its position in the tensor of the whole model. Other values are plain.
The state has weights, master weights, Adam's moments and step, loss scale, learning-rate schedule,
random states and the position in the data. On the same parallel layout a resumed run continues bit
for bit. On another layout everything but the random states is resharded.
"""

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from bridge.runtime.megatron.emulation.fp8_regions import list_delayed_updates
from bridge.runtime.megatron.emulation.stored_weight import StoredWeight
from bridge.runtime.megatron.model.gpt import compute_padded_vocab_size, unwrap_model
from bridge.runtime.megatron.optimizer import list_chained_optimizers
from bridge.runtime.megatron.patching import Patch, apply_patches, keep_compatible
from bridge.runtime.megatron.trainer import Trainer

SHARDING_METADATA: dict[str, Any] = {
    # Megatron cannot load the default form, and the form dp_reshardable drops the step.
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
"""How Megatron shards the optimizer's state."""
_SHAPE_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_moe_experts",
    "multi_latent_attention",
    "mtp_num_layers",
)
"""Fields of a model config that decide the shapes of its weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How far a run has come."""

    iteration: int = 0
    """Number of finished steps."""
    consumed_samples: int = 0
    """Training samples that all ranks together have consumed."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Values that the caller stored with the checkpoint."""


def get_parallel_layout() -> dict[str, int]:
    """Return the sizes of the parallel layout on which the random states of ranks depend."""
    sizes: dict[str, int] = {}
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if virtual is not None:
        sizes["virtual_pipeline_model_parallel_size"] = virtual
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    sizes["tensor_model_parallel_size"] = tensor
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    sizes["pipeline_model_parallel_size"] = pipeline
    return sizes


def collect_identity(trainer: Trainer) -> dict[str, Any]:
    """Return the settings that must be equal between a checkpoint and the run that resumes it."""
    config = trainer.config
    optimizer = trainer.optimizer
    is_half = optimizer.config.fp16 or optimizer.config.bf16
    settings = {f"model.{name}": getattr(config, name) for name in _SHAPE_FIELDS}
    settings |= {
        "model.vocab_size, padded": compute_padded_vocab_size(config),
        "model.share_embeddings_and_output_weights": config.share_embeddings_and_output_weights,
        "optimizer.use_distributed_optimizer": bool(_list_distributed_optimizers(optimizer)),
        "optimizer.fp16 or bf16": bool(is_half),
    }
    return settings


def _list_distributed_optimizers(optimizer: Any) -> list[Any]:
    """Return the distributed optimizers that an optimizer consists of."""
    return [part for part in list_chained_optimizers(optimizer) if hasattr(part, "gbuf_ranges")]


def _collect_random_states() -> ShardedObject:
    """Return this rank's random states as an entry of the checkpoint.

    Data-parallel ranks have equal states.
    """
    # Megatron's data code may draw from this state
    kind, key, *rest = np.random.get_state()  # noqa: NPY002
    plain_key = np.asarray(key).tolist()  # so that loading runs no code of the file
    states = {
        "random": random.getstate(),
        "numpy": (kind, plain_key, *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    sizes = get_parallel_layout()
    ranks = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    return ShardedObject(
        "rng_state",
        [states],
        (sizes["pipeline_model_parallel_size"], sizes["tensor_model_parallel_size"]),
        ranks,
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def name_chunks(trainer: Trainer) -> dict[str, Any]:
    """Return the model chunks by Megatron's names: model, or model0, model1, ... of several."""
    if len(trainer.model) == 1:
        return {"model": trainer.model[0]}
    return {f"model{index}": chunk for index, chunk in enumerate(trainer.model)}


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Set the random states of this process to the random states of a checkpoint."""
    random.setstate(states["random"])
    np.random.set_state(states["numpy"])  # noqa: NPY002 see `_collect_random_states`
    torch.set_rng_state(states["torch"])
    tensor_parallel.random._set_cuda_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])


@cache
def _needs_padding() -> bool:
    """Return whether this megatron-core saves state at wrong positions, without the padding.

    A release without the fault has a variable for the adjustment in its source.
    """
    return "padding_adjustment" not in inspect.getsource(
        DistributedOptimizer.sharded_param_state_fully_reshardable
    )


def _gather_with_padding(
    gather: Callable[..., Any], buffers: Sequence[Any], *arguments: Any, **named: Any
) -> Any:
    """Gather the state of a distributed optimizer with the padding between its buckets.

    megatron-core 0.16.1 removes the padding (distrib_optimizer.py:1110), and then reads each
    parameter at the position that it has with the padding (:1475). Parameters after a padded bucket
    are saved some elements off, without an error. Since 2026-08-21 (commit 32a03b77c5, in 0.20.0)
    it reads them at the right position.
    """
    state = gather(*arguments, **named)
    if state is None:
        return None
    for number, buffer in enumerate(buffers):
        sizes = [(bucket.numel_unpadded, bucket.grad_data.numel()) for bucket in buffer.buckets]
        if not any(unpadded < padded for unpadded, padded in sizes[:-1]):
            continue
        for tensors in state[number].values():
            for name, tensor in tensors.items():
                if isinstance(tensor, torch.Tensor):
                    tensors[name] = _pad_buckets(tensor, sizes)
    return state


def _pad_buckets(tensor: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return a tensor whose parts are padded with zeros.

    Args:
        tensor: The parts one after the other, without padding.
        sizes: (unpadded, padded) size of each part.
    """
    unpadded_sizes = [unpadded for unpadded, _ in sizes]
    pieces = []
    for piece, (unpadded, padded) in zip(torch.split(tensor, unpadded_sizes), sizes, strict=True):
        pieces.append(torch.nn.functional.pad(piece, (0, padded - unpadded)))
    return torch.cat(pieces)


def _list_padding_patches(optimizer: Any) -> list[Patch]:
    """Return the patches that gather with the padding; empty for a release without the fault."""
    changes: list[Patch] = []
    if not _needs_padding():
        return changes
    name = "get_parameter_state_dp_zero"
    for part in _list_distributed_optimizers(optimizer):
        gather = partial(_gather_with_padding, getattr(part, name), part.buffers)
        changes.append((part, name, gather))
    return changes


def build_sharded_state(
    trainer: Trainer, *, is_loading: bool, with_random_states: bool
) -> dict[str, Any]:
    """Return the run's state, with tensors marked by their position in the whole tensor."""
    metadata = {
        **SHARDING_METADATA,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    for updates in list_delayed_updates(trainer.model):
        # A checkpoint keeps the delayed scales of one tensor-parallel rank for all of them.
        updates.reduce_pending()
    models = {}
    for name, chunk in name_chunks(trainer).items():
        models[name] = unwrap_model(chunk).sharded_state_dict(metadata=metadata)
    model = models
    if len(models) == 1:
        model = models["model"]
    with apply_patches(keep_compatible(_list_padding_patches(trainer.optimizer))):
        optimizer = trainer.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=metadata
        )
    state = {
        **models,
        "optimizer": optimizer,
        "opt_param_scheduler": trainer.scheduler.state_dict(),
    }
    for entry in nested_values(model):
        if isinstance(getattr(entry, "data", None), StoredWeight):
            entry.data = entry.data.dequantize()
    if with_random_states:
        state["rng_state"] = _collect_random_states()
    return state
