"""`find_uneven_sizes`: the sizes of a model that cannot be split evenly over their ranks."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from bridge.model.layout import ParallelLayout
from bridge.model.shape import ModelShape


class Division(NamedTuple):
    """A size and the ranks that share it."""

    path: str
    """The setting of the size."""
    size: int | None
    ranks: str
    """The name of the ranks, as text."""
    parts: int
    """The number of equal parts into which the size must divide."""


def find_uneven_sizes(
    model: Any, shape: ModelShape, ranks: ParallelLayout, seq_length: int | None
) -> Iterator[Division]:
    """Yield each size of `model` that cannot be split evenly over its ranks."""
    for division in _list_divisions(model, shape, ranks, seq_length):
        size = division.size
        if size is not None and size > 0 and size % division.parts:
            yield division


def _list_divisions(
    model: Any, shape: ModelShape, ranks: ParallelLayout, seq_length: int | None
) -> Iterator[Division]:
    """Yield the sizes of a model that ranks share. A missing size is None or 0."""
    tensor = f"TP {ranks.tensor}"
    yield Division("model.num_attention_heads", model.num_attention_heads, tensor, ranks.tensor)
    groups = model.num_query_groups or 0
    if groups and ranks.tensor % groups:  # otherwise several ranks share a group
        yield Division("model.num_query_groups", groups, tensor, ranks.tensor)
    yield Division("model.ffn_hidden_size", model.ffn_hidden_size, tensor, ranks.tensor)
    if shape.is_moe:
        experts = f"expert TP {ranks.expert_tensor}"
        width = model.moe_ffn_hidden_size
        yield Division("model.moe_ffn_hidden_size", width, experts, ranks.expert_tensor)
    expert_ranks = f"EP {ranks.expert}"
    yield Division("model.num_moe_experts", model.num_moe_experts, expert_ranks, ranks.expert)
    space = shape.state_space
    if shape.is_hybrid and space is not None:
        yield Division("model.mamba_num_heads", space.num_heads, tensor, ranks.tensor)
        yield Division("model.mamba_num_groups", space.num_groups, tensor, ranks.tensor)
    yield _make_sequence_division(model, ranks, seq_length)


def _make_sequence_division(model: Any, ranks: ParallelLayout, seq_length: int | None) -> Division:
    """Return the division of a sequence.

    A context-parallel rank has two chunks, one of each half of the sequence.
    """
    path = "data.seq_length"
    if model.seq_length:
        path = "model.seq_length"
    chunks, rank_names = 1, f"CP {ranks.context}"
    if ranks.context > 1:
        chunks, rank_names = 2, f"two chunks on each of CP {ranks.context}"
    if ranks.sequence_parallel:
        rank_names += f" x TP {ranks.tensor}"
    return Division(path, seq_length, rank_names, chunks * ranks.token_ranks)
