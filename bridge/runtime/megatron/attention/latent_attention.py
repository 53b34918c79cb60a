"""`LatentAttention`: latent attention without Transformer Engine, with a whole rotary gradient."""

from typing import Any

from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor


class LatentAttention(MLASelfAttention):  # type: ignore[misc]  # Megatron is untyped
    """`MLASelfAttention` whose rotary key has its whole gradient under tensor parallelism.

    Megatron gives the gathered rotary key to the heads of each rank, and then takes only the
    gradient of that rank's heads (multi_latent_attention.py:605-614 in 0.16.1). So a run under
    tensor parallelism trains differently from a single process. Here the down projection returns
    its part of the sequence with the whole latent, as Transformer Engine's does. Megatron then
    gathers the rotary key itself, with the gradients of all ranks.

    *Differs*: Megatron's local down projections are column-parallel, and Transformer Engine's are
    whole on each rank. So under tensor parallelism a scale of a whole tensor is here the scale of a
    rank's part of the down projection's weight.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.sequence_parallel:
            self.linear_kv_down_proj.register_forward_hook(_redistribute_latent)


def _redistribute_latent(
    _layer: Any, _inputs: Any, output: tuple[Tensor, Any]
) -> tuple[Tensor, Any]:
    """Return the whole latent and rotary key of this rank's part of the sequence.

    It is a hook of torch.

    The layer's output is this rank's part of latent and rotary key, of the whole sequence.
    """
    latent_part, bias = output
    latent = gather_from_tensor_model_parallel_region(latent_part)
    return scatter_to_sequence_parallel_region(latent), bias
