"""Megatron's multi-latent attention without Transformer Engine.

Megatron's local down projections are column-parallel: each tensor-parallel rank computes its part of the latent, and
the parts are gathered. Transformer Engine's are whole on each rank. So under tensor parallelism a scale of a whole
tensor covers a rank's part of the down projection's weight here, and the whole weight there.

Megatron gives each rank's heads the gathered rotary key, and takes the gradient of that rank's heads alone for it
(multi_latent_attention.py:605-614 in 0.16.1), so a run under tensor parallelism trains otherwise than one process. Here
the down projection returns its part of the sequence with the whole latent, as Transformer Engine's does; Megatron then
gathers the rotary key itself, with the gradients of all ranks.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention


class LatentAttention(MLASelfAttention):  # type: ignore[misc]  # Megatron is untyped
    """`MLASelfAttention` whose rotary key has its whole gradient under tensor parallelism."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.sequence_parallel:
            self.linear_kv_down_proj.register_forward_hook(_whole_latent)


def _whole_latent(_layer: Any, _inputs: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    """Return the latent and the rotary key of this rank's part of the sequence, from this rank's part of both."""
    part, bias = output
    return scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(part)), bias
