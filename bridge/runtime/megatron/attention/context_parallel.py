"""Functions that split a sequence over the ranks of context parallelism, and join it again.

A sequence has 2 x ranks chunks. A rank has one chunk from the front and one from the back, so that
causal attention is the same work on each rank. A chunk of queries attends to all keys up to the end
of the chunk.

Source: megatron-core 0.16.1 utils.py, get_batch_on_this_cp_rank; Transformer Engine 2.20.2
pytorch/attention/dot_product_attention/context_parallel.py, AttnFuncWithCPAndKVAllGather.
"""

import torch


def get_rank_chunks(rank: int, ranks: int) -> tuple[int, int]:
    """Return the numbers of a context-parallel rank's two chunks, of 2 x ranks chunks."""
    return rank, 2 * ranks - 1 - rank


def take_rank_part(full: torch.Tensor, rank: int, ranks: int, *, dim: int) -> torch.Tensor:
    """Return a rank's two chunks of a tensor, one after the other.

    Args:
        full: The tensor, whose axis `dim` is the whole sequence.
        rank: The context-parallel rank.
        ranks: Number of context-parallel ranks.
        dim: Axis of the sequence.
    """
    if ranks == 1:
        return full
    chunks = full.chunk(2 * ranks, dim=dim)
    first, second = get_rank_chunks(rank, ranks)
    return torch.cat([chunks[first], chunks[second]], dim=dim)


def restore_sequence_order(gathered: torch.Tensor, ranks: int, *, dim: int) -> torch.Tensor:
    """Return the whole sequence in its order.

    Args:
        gathered: The results of `take_rank_part` of all ranks, one after the other in `dim`.
        ranks: Number of context-parallel ranks.
        dim: Axis of the sequence.
    """
    chunks = iter(gathered.chunk(2 * ranks, dim=dim))
    chunk_of_number: dict[int, torch.Tensor] = {}
    for rank in range(ranks):
        for number in get_rank_chunks(rank, ranks):
            chunk_of_number[number] = next(chunks)
    ordered = [chunk_of_number[number] for number in range(2 * ranks)]
    return torch.cat(ordered, dim=dim)
