# ruff: noqa: N803  (shape suffixes are capitals)
"""Attention in one operator, and the parts of a sequence under context parallelism.

Of 2 x ranks chunks a rank holds one from the front and one from the back, so that causal attention
is the same work for each. A chunk of queries attends to all keys up to its own end.

Shapes: S sequence, B batch, N heads, G key/value heads, D width of a head.
Source: megatron-core 0.16.1 utils.py, get_batch_on_this_cp_rank; Transformer Engine 2.20.2
pytorch/attention/dot_product_attention/context_parallel.py, AttnFuncWithCPAndKVAllGather.
"""

import torch
import torch.nn.functional as F  # noqa: N812 torch's own abbreviation

from bridge.runtime.megatron import wide_gemm


def multiplied_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which this CPU multiplies operands of a dtype."""
    if wide_gemm.is_widened(dtype):
        return torch.float32
    return dtype


def attended(
    q_BNSD: torch.Tensor,
    k_BGSD: torch.Tensor,
    v_BGSD: torch.Tensor,
    *,
    scale: float,
    is_causal: bool,
) -> torch.Tensor:
    """Return the attended values, (B, N, S, D), in the dtype of the operands.

    The last query is at the place of the last key; with `is_causal` a query attends
    to the keys up to its own place.
    """
    queries, keys = q_BNSD.shape[2], k_BGSD.shape[2]
    mask = None
    if is_causal and queries != keys:
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


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """Return the numbers of a context-parallel rank's two chunks, of 2 x ranks chunks."""
    return rank, 2 * ranks - 1 - rank


def own_part(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return a rank's part of a tensor whose second axis is the sequence."""
    if ranks == 1:
        return whole
    chunks = whole.chunk(2 * ranks, dim=1)
    first, second = chunks_of(rank, ranks)
    return torch.cat([chunks[first], chunks[second]], dim=1)


def in_order(gathered: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return the whole sequence in order, from the parts of all ranks along axis 0."""
    parts = iter(gathered.chunk(2 * ranks))
    part_of: dict[int, torch.Tensor] = {}
    for rank in range(ranks):
        for number in chunks_of(rank, ranks):
            part_of[number] = next(parts)
    ordered = [part_of[number] for number in range(2 * ranks)]
    return torch.cat(ordered)
