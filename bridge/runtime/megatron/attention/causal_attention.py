# ruff: noqa: N803  (shape suffixes are capitals)
"""Attention in one operator of torch, causal or without a mask.

Shapes: S sequence, B batch, N heads, G key/value heads, D width of a head.
"""

import torch
import torch.nn.functional as F  # noqa: N812 torch's own abbreviation

from bridge.runtime.megatron.cpu import wide_gemm


def get_gemm_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which this CPU multiplies operands of a dtype."""
    if wide_gemm.is_widened(dtype):
        return torch.float32
    return dtype


def compute_attention(
    q_BNSD: torch.Tensor,
    k_BGSD: torch.Tensor,
    v_BGSD: torch.Tensor,
    *,
    scale: float,
    is_causal: bool,
) -> torch.Tensor:
    """Return the attended values, (B, N, S, D), in the dtype of the operands.

    Args:
        q_BNSD: Queries.
        k_BGSD: Keys, as many as queries or more.
        v_BGSD: Values.
        scale: Factor on the scores before the softmax.
        is_causal: Whether a query attends only to the keys up to its position. The last query
            has the position of the last key.
    """
    queries, keys = q_BNSD.shape[2], k_BGSD.shape[2]
    mask = None
    if is_causal and queries != keys:
        # torch's causal mask gives the first query the position of the first key.
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return F.scaled_dot_product_attention(
        q_BNSD,
        k_BGSD,
        v_BGSD,
        attn_mask=mask,
        is_causal=is_causal and mask is None,
        scale=scale,
        enable_gqa=q_BNSD.shape[1] != k_BGSD.shape[1],
    )
