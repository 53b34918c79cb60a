"""Attention without Transformer Engine, in a fused operator.

`FusedDotProductAttention` is torch's `scaled_dot_product_attention` inside Megatron's
core-attention module. Megatron's implementation writes the scores to memory and passes over them
for the scale, the mask, the cast to FP32, the softmax and the cast back; on a CPU that is a third
of a small model's step. The fused operator keeps the scores in cache. It computes causal
self-attention with the softmax in FP32 and products of 16-bit operands accumulated in FP32, as
Megatron does.

*Differs*: on a CPU without a 16-bit GEMM (`wide_gemm.py`) the probabilities enter the second
product in FP32, and are not rounded to 16 bits.

All other attention (masks, dropout, sliding windows, softmax offsets, 16-bit softmax) goes to
Megatron's implementation, which has no context parallelism. With the fused operator there is
context parallelism: keys and values are gathered over the ranks.

Shapes: S sequence, B batch, N heads of this rank, G key/value heads of this rank, D width of a
head.
"""

# ruff: noqa: N806 tensors carry their shape in capitals

import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from bridge.errors import RunConfigError
from bridge.runtime.megatron.attention.causal_attention import compute_attention, get_gemm_dtype
from bridge.runtime.megatron.attention.context_parallel import (
    get_rank_chunks,
    restore_sequence_order,
)


class FusedDotProductAttention(DotProductAttention):  # type: ignore[misc]  # Megatron is untyped
    """Megatron's `DotProductAttention` with a fused path for plain causal self-attention.

    Like the constructor of Transformer Engine's class, and unlike Megatron's, the constructor also
    takes `k_channels` and `v_channels`, the widths of latent attention.
    """

    def __init__(
        self,
        config: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        config = copy.copy(config)
        config.context_parallel_size = 1  # Megatron's constructor refuses more
        super().__init__(config, *args, **kwargs)
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
        """Return the attended values, [S, B, N * D].

        Args:
            query: [S, B, N, D].
            key: [S, B, G, D].
            value: [S, B, G, D].
            attention_mask: A mask, which the fused operator does not take. None: no mask.
            *args: Megatron's further arguments.
            **kwargs: Megatron's further arguments.

        Raises:
            RunConfigError: The attention is not fused, under context parallelism.
        """
        # args[0] is `attn_mask_type`, which Megatron does not read. The layer has the same setting.
        others = (*args[1:], kwargs.get("attention_bias"), kwargs.get("packed_seq_params"))
        is_plain = attention_mask is None and all(other is None for other in others)
        group = parallel_state.get_context_parallel_group()
        if is_plain and self._can_fuse(query, key):
            if group.size() == 1:
                return self._attend(query, key, value)
            return self._attend_context_parallel(group, query, key, value)
        if group.size() > 1:
            raise RunConfigError.of(
                "model.context_parallel_size",
                "attention with a mask, a window or dropout has no context parallelism here",
                group.size(),
                "Set it to 1.",
            )
        output: Tensor = super().forward(query, key, value, attention_mask, *args, **kwargs)
        return output

    def _can_fuse(self, query: Tensor, key: Tensor) -> bool:
        """Return whether the fused operator computes the attention of this layer's settings."""
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

    def _attend_context_parallel(
        self, group: Any, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Return the attended values of this rank's two chunks of a context-parallel group."""
        ranks = group.size()
        gathered_keys = gather_from_sequence_parallel_region(key, group=group)
        gathered_values = gather_from_sequence_parallel_region(value, group=group)
        keys = restore_sequence_order(gathered_keys, ranks, dim=0)
        values = restore_sequence_order(gathered_values, ranks, dim=0)
        chunks = query.chunk(2)
        size = len(chunks[0])
        outputs = []
        for number, chunk in zip(get_rank_chunks(group.rank(), ranks), chunks, strict=True):
            end = size * (number + 1)
            outputs.append(self._attend(chunk, keys[:end], values[:end]))
        return torch.cat(outputs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attended values, [S, B, N * D]. The last query has the last key's position."""
        dtype = get_gemm_dtype(query.dtype)
        q_BNSD = query.permute(1, 2, 0, 3).to(dtype)
        k_BGSD = key.permute(1, 2, 0, 3).to(dtype)
        v_BGSD = value.permute(1, 2, 0, 3).to(dtype)
        out_BNSD = compute_attention(
            q_BNSD, k_BGSD, v_BGSD, scale=self.softmax_scale, is_causal=True
        )
        return out_BNSD.to(query.dtype).permute(2, 0, 1, 3).flatten(2)
