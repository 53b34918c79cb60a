"""Latent attention without Transformer Engine, with the whole gradient of its rotary key."""

from typing import Any

from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor


class LatentAttention(MLASelfAttention):  # type: ignore[misc]  # Megatron is untyped
    """`MLASelfAttention` whose rotary key has its whole gradient under tensor parallelism.

    Megatron gives each rank's heads the gathered rotary key, and takes the gradient of that rank's
    heads alone for it (multi_latent_attention.py:605-614 in 0.16.1), so a run under tensor
    parallelism trains otherwise than a single process. Here the down projection returns its part of the
    sequence with the whole latent, as Transformer Engine's does; Megatron then gathers the rotary
    key itself, with the gradients of all ranks.

    *Differs*: Megatron's local down projections are column-parallel, Transformer Engine's are whole
    on each rank. So under tensor parallelism a scale of a whole tensor covers a rank's part of the
    down projection's weight here.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.sequence_parallel:
            self.linear_kv_down_proj.register_forward_hook(_redistribute_latent)


def _redistribute_latent(
    _layer: Any, _inputs: Any, output: tuple[Tensor, Any]
) -> tuple[Tensor, Any]:
    """Return the latent and the rotary key of this rank's part of the sequence.

    The input is this rank's part of both.
    """
    part, bias = output
    whole = gather_from_tensor_model_parallel_region(part)
    return scatter_to_sequence_parallel_region(whole), bias
