"""Attention without Transformer Engine: a fused operator, and a repair of latent attention.

`FusedDotProductAttention` is torch's `scaled_dot_product_attention` inside Megatron's core-attention
module. Megatron's implementation writes the scores to memory and passes over them for the scale, the
mask, the cast to FP32, the softmax and the cast back; on a CPU that is a third of a small model's
step. The fused operator keeps the scores in cache. It computes causal self-attention with the
softmax in FP32 and products of 16-bit operands accumulated in FP32, as Megatron does.

*Differs*: on a CPU without a 16-bit GEMM (`wide_gemm.py`) the probabilities enter the second product
in FP32, and are not rounded to 16 bits.

All other attention (masks, dropout, sliding windows, softmax offsets, 16-bit softmax) goes to
Megatron's implementation, which has no context parallelism. The fused operator has it: keys and
values are gathered over the ranks.

`LatentAttention` gives its rotary key the whole gradient.
"""

# ruff: noqa: N806 tensors carry their shape in capitals

import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from bridge.errors import RunConfigError
from bridge.runtime.megatron.causal_attention import attended, chunks_of, in_order, multiplied_dtype

# Shapes: S sequence, B batch, N heads of this rank, G key/value heads of this rank, D width of a
# head.


class FusedDotProductAttention(DotProductAttention):  # type: ignore[misc]  # Megatron is untyped
    """Megatron's `DotProductAttention` with a fused path for plain causal self-attention.

    It also takes the widths of latent attention, as Transformer Engine's does;
    Megatron's constructor does not.
    """

    def __init__(
        self,
        config: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # Megatron's constructor refuses more
        super().__init__(alone, *args, **kwargs)
        del k_channels  # the width of queries and keys is read from them
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return the attended values, [S, B, N * D]."""
        others = (*args[1:], kwargs.get("attention_bias"), kwargs.get("packed_seq_params"))
        is_plain = attention_mask is None and all(other is None for other in others)
        group = parallel_state.get_context_parallel_group()
        if is_plain and self._is_fused(query, key):
            if group.size() == 1:
                return self._attended(query, key, value)
            return self._attended_over(group, query, key, value)
        if group.size() > 1:
            raise RunConfigError.of(
                "model.context_parallel_size",
                "attention with a mask, a window or dropout has no context parallelism here",
                group.size(),
                "Set it to 1.",
            )
        output: Tensor = super().forward(query, key, value, attention_mask, *args, **kwargs)
        return output

    def _is_fused(self, query: Tensor, key: Tensor) -> bool:
        """Return whether the fused operator computes what the settings of this layer ask for."""
        softmax = self.scale_mask_softmax
        return (
            self.attn_mask_type == AttnMaskType.causal
            and query.shape[0] == key.shape[0]
            and softmax.window_size is None
            and softmax.scale is None
            and self.softmax_offset is None
            and (self.config.attention_softmax_in_fp32 or query.dtype == torch.float32)
            and not (self.training and self.attention_dropout.p)
        )

    def _attended_over(self, group: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attended values of this rank's two chunks of a context-parallel group."""
        ranks = group.size()
        keys = in_order(gather_from_sequence_parallel_region(key, group=group), ranks)
        values = in_order(gather_from_sequence_parallel_region(value, group=group), ranks)
        chunks = query.chunk(2)
        size = len(chunks[0])
        outputs = []
        for number, chunk in zip(chunks_of(group.rank(), ranks), chunks, strict=True):
            end = size * (number + 1)
            outputs.append(self._attended(chunk, keys[:end], values[:end]))
        return torch.cat(outputs)

    def _attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attended values, [S, B, N * D].

        The last query is at the place of the last key.
        """
        dtype = multiplied_dtype(query.dtype)
        q_BNSD = query.permute(1, 2, 0, 3).to(dtype)
        k_BGSD = key.permute(1, 2, 0, 3).to(dtype)
        v_BGSD = value.permute(1, 2, 0, 3).to(dtype)
        out_BNSD = attended(q_BNSD, k_BGSD, v_BGSD, scale=self.softmax_scale, is_causal=True)
        return out_BNSD.to(query.dtype).permute(2, 0, 1, 3).flatten(2)


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
            self.linear_kv_down_proj.register_forward_hook(_whole_latent)


def _whole_latent(_layer: Any, _inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Return the latent and the rotary key of this rank's part of the sequence.

    The input is this rank's part of both.
    """
    part, bias = output
    whole = gather_from_tensor_model_parallel_region(part)
    return scatter_to_sequence_parallel_region(whole), bias
