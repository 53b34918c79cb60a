"""The state of a run as a checkpoint holds it: tensors marked with their place in the whole, and plain values.

On the same layout a resumed run continues bit for bit: weights, master weights, Adam's moments and step, loss scale,
learning-rate schedule, random states and the place in the data. On another layout everything but the random states is
resharded.
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

from bridge.runtime.megatron.emulation.model import delayed_updates
from bridge.runtime.megatron.emulation.stored_weight import StoredWeight
from bridge.runtime.megatron.gpt import padded_vocab_size, unwrapped
from bridge.runtime.megatron.optimizer import parts
from bridge.runtime.megatron.replacement import fitting, replaced
from bridge.runtime.megatron.step import Trainer

SHARDING: dict[str, Any] = {
    "distrib_optim_sharding_type": "fully_reshardable",  # the default cannot be loaded, dp_reshardable drops the step
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
"""How Megatron shards the optimizer's state."""
_SHAPE = (
    *(
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
    ),
    *("num_moe_experts", "multi_latent_attention", "mtp_num_layers"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How far a run has come."""

    iteration: int = 0
    consumed_samples: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Values that the caller stored with the checkpoint."""


def layout() -> dict[str, int]:
    """Return the sizes of the parallel layout that decide whose random states are whose."""
    sizes = {
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
    }
    return {name: size for name, size in sizes.items() if size is not None}


def identity(trainer: Trainer) -> dict[str, Any]:
    """Return the settings that must be equal between a checkpoint and the run that resumes it."""
    config = trainer.config
    return {
        **{f"model.{name}": getattr(config, name) for name in _SHAPE},
        "model.vocab_size, padded": padded_vocab_size(config),
        "model.share_embeddings_and_output_weights": config.share_embeddings_and_output_weights,
        "optimizer.use_distributed_optimizer": any(
            hasattr(part, "gbuf_ranges") for part in parts(trainer.optimizer)
        ),
        "optimizer.fp16 or bf16": bool(
            trainer.optimizer.config.fp16 or trainer.optimizer.config.bf16
        ),
    }


def _random_states() -> ShardedObject:
    """Return this rank's random states as an entry of the checkpoint; data-parallel ranks have equal ones."""
    kind, key, *rest = np.random.get_state()  # noqa: NPY002 the state Megatron's data code may draw from
    states = {
        "random": random.getstate(),
        "numpy": (
            kind,
            np.asarray(key).tolist(),
            *rest,
        ),  # plain data, so that loading runs no code of the file
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    sizes = layout()
    return ShardedObject(
        "rng_state",
        [states],
        (sizes["pipeline_model_parallel_size"], sizes["tensor_model_parallel_size"]),
        (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        ),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def named_chunks(trainer: Trainer) -> dict[str, Any]:
    """Return the model chunks under Megatron's names for them: model, or model0, model1, ... of a rank with several."""
    if len(trainer.model) == 1:
        return {"model": trainer.model[0]}
    return {f"model{index}": chunk for index, chunk in enumerate(trainer.model)}


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Give this process the random states of a checkpoint."""
    random.setstate(states["random"])
    np.random.set_state(states["numpy"])  # noqa: NPY002 see _random_states
    torch.set_rng_state(states["torch"])
    tensor_parallel.random._set_cuda_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])


@cache
def _wants_padding() -> bool:
    """Return whether this megatron-core looks for state where it is with the padding, and takes none off."""
    return "padding_adjustment" not in inspect.getsource(
        DistributedOptimizer.sharded_param_state_fully_reshardable
    )


def _gathered_with_padding(
    gather: Callable[..., Any], buffers: Sequence[Any], *arguments: Any, **named: Any
) -> Any:
    """Gather the state of a distributed optimizer with the padding between its buckets.

    megatron-core leaves the padding out (distrib_optimizer.py:1110) and looks for each parameter where it is with it
    (:1475): whatever follows a padded bucket is saved some elements off, without an error. Since 2026-08-21 (commit
    32a03b77c5, in 0.20.0) it looks for it where it is.
    """
    state = gather(*arguments, **named)
    for number, buffer in enumerate(buffers if state is not None else ()):
        sizes = [(bucket.numel_unpadded, bucket.grad_data.numel()) for bucket in buffer.buckets]
        for tensors in state[number].values():
            for name, held in tensors.items():
                if isinstance(held, torch.Tensor) and any(
                    own < padded for own, padded in sizes[:-1]
                ):
                    tensors[name] = _padded(held, sizes)
    return state


def _padded(held: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return parts of a tensor, each with zeros up to its padded size; `sizes` has (own, padded) of each."""
    pieces = zip(torch.split(held, [own for own, _ in sizes]), sizes, strict=True)
    return torch.cat(
        [torch.nn.functional.pad(piece, (0, padded - own)) for piece, (own, padded) in pieces]
    )


def sharded_state(
    trainer: Trainer, *, is_loading: bool, with_random_states: bool
) -> dict[str, Any]:
    """Return the run's state, with tensors marked by their place in the whole."""
    metadata = {
        **SHARDING,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    for updates in delayed_updates(trainer.model):
        updates.reduce_pending()  # tensor-parallel ranks are taken for copies of each other
    models = {
        name: unwrapped(chunk).sharded_state_dict(metadata=metadata)
        for name, chunk in named_chunks(trainer).items()
    }
    model = models if len(models) > 1 else models["model"]
    gather = "get_parameter_state_dp_zero"
    sharded = (
        [part for part in parts(trainer.optimizer) if hasattr(part, "gbuf_ranges")]
        if _wants_padding()
        else []
    )
    padded = (
        (one, gather, partial(_gathered_with_padding, getattr(one, gather), one.buffers))
        for one in sharded
    )
    with replaced(fitting(padded)):
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
        state["rng_state"] = _random_states()
    return state
