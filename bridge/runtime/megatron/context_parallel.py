"""The split of a sequence over the ranks of context parallelism.

A sequence has 2 x ranks chunks. A rank has a chunk from the front and a chunk from the back, so that
causal attention is the same work for each rank. A chunk of queries attends to all keys up to the end
of the chunk.

Source: megatron-core 0.16.1 utils.py, get_batch_on_this_cp_rank; Transformer Engine 2.20.2
pytorch/attention/dot_product_attention/context_parallel.py, AttnFuncWithCPAndKVAllGather.
"""

import torch


def get_rank_chunks(rank: int, ranks: int) -> tuple[int, int]:
    """Return the numbers of a context-parallel rank's two chunks, of 2 x ranks chunks."""
    return rank, 2 * ranks - 1 - rank


def take_rank_part(whole: torch.Tensor, rank: int, ranks: int, *, dim: int) -> torch.Tensor:
    """Return a rank's part of a tensor whose axis `dim` is the whole sequence."""
    if ranks == 1:
        return whole
    chunks = whole.chunk(2 * ranks, dim=dim)
    first, second = get_rank_chunks(rank, ranks)
    return torch.cat([chunks[first], chunks[second]], dim=dim)


def restore_sequence_order(gathered: torch.Tensor, ranks: int, *, dim: int) -> torch.Tensor:
    """Return the whole sequence in order, from the parts of all ranks one after another in `dim`."""
    parts = iter(gathered.chunk(2 * ranks, dim=dim))
    part_of: dict[int, torch.Tensor] = {}
    for rank in range(ranks):
        for number in get_rank_chunks(rank, ranks):
            part_of[number] = next(parts)
    ordered = [part_of[number] for number in range(2 * ranks)]
    return torch.cat(ordered, dim=dim)
