"""`find_uneven_sizes`: the sizes of a model that cannot be split evenly over their ranks."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from bridge.model.layout import ParallelLayout
from bridge.model.shape import ModelShape

TENSOR_SIZE = "model.tensor_model_parallel_size"
EXPERT_TENSOR_SIZES = (TENSOR_SIZE, "model.expert_tensor_parallel_size")
"""The settings that decide the expert tensor-parallel size. The second is unset in most runs."""
EXPERT_SIZE = "model.expert_model_parallel_size"
PIPELINE_SIZE = "model.pipeline_model_parallel_size"
CONTEXT_SIZE = "model.context_parallel_size"


class RankGroup(NamedTuple):
    """Ranks that share a size."""

    label: str
    """The kind of the ranks and their number, for a message."""
    parts: int
    """The number of equal parts into which the size must divide."""
    settings: tuple[str, ...]
    """The settings that decide the number of ranks."""


class Division(NamedTuple):
    """A size and the ranks that share it."""

    path: str
    """The setting of the size."""
    size: int | None
    group: RankGroup


def find_uneven_sizes(
    model: Any, shape: ModelShape, layout: ParallelLayout, seq_length: int | None
) -> Iterator[Division]:
    """Yield each size of `model` that cannot be split evenly over its ranks."""
    for division in _list_divisions(model, shape, layout, seq_length):
        size = division.size
        if size is not None and size > 0 and size % division.group.parts:
            yield division


def _list_divisions(
    model: Any, shape: ModelShape, layout: ParallelLayout, seq_length: int | None
) -> Iterator[Division]:
    """Yield the sizes of a model that ranks share. A missing size is None or 0."""
    tensor = RankGroup(f"TP {layout.tensor}", layout.tensor, (TENSOR_SIZE,))
    yield Division("model.num_attention_heads", model.num_attention_heads, tensor)
    query_groups = model.num_query_groups or 0
    if query_groups and layout.tensor % query_groups:  # otherwise several ranks share a group
        yield Division("model.num_query_groups", query_groups, tensor)
    yield Division("model.ffn_hidden_size", model.ffn_hidden_size, tensor)
    if shape.is_moe:
        label = f"expert TP {layout.expert_tensor}"
        expert_tensor = RankGroup(label, layout.expert_tensor, EXPERT_TENSOR_SIZES)
        yield Division("model.moe_ffn_hidden_size", model.moe_ffn_hidden_size, expert_tensor)
    expert = RankGroup(f"EP {layout.expert}", layout.expert, (EXPERT_SIZE,))
    yield Division("model.num_moe_experts", model.num_moe_experts, expert)
    space = shape.state_space
    if shape.is_hybrid and space is not None:
        yield Division("model.mamba_num_heads", space.num_heads, tensor)
        yield Division("model.mamba_num_groups", space.num_groups, tensor)
    path = "data.seq_length"
    if model.seq_length:
        path = "model.seq_length"
    yield Division(path, seq_length, _make_sequence_group(layout))


def _make_sequence_group(layout: ParallelLayout) -> RankGroup:
    """Return the ranks that share a sequence.

    A context-parallel rank has two chunks, one of each half of the sequence.
    """
    chunks, label, settings = 1, f"CP {layout.context}", [CONTEXT_SIZE]
    if layout.context > 1:
        chunks, label = 2, f"two chunks on each of CP {layout.context}"
    if layout.sequence_parallel:
        label += f" x TP {layout.tensor}"
        settings += [TENSOR_SIZE, "model.sequence_parallel"]
    return RankGroup(label, chunks * layout.token_ranks, tuple(settings))
