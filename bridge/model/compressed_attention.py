"""DeepSeek-V4's hybrid attention, and hyper-connections: parts beyond a transformer layer.

A layer of the hybrid attention attends to the tokens of a window. It also attends to the tokens
before the window in compressed form, depending on its ratio in `csa_compress_ratios`. Ratio 4 makes
one key of 4 tokens, and an indexer chooses among the keys. Ratio 128 makes one key of 128 tokens,
and the layer attends to all keys. Ratio 0 has no compressed keys.

Hyper-connections have several residual streams. A module before each attention and before each MLP
mixes these streams.

Source: Megatron-LM dev of 2026-08-21 (d48bd6be), transformer/experimental_attention_variant/csa.py
and deepseek_v4_hybrid_attention.py, transformer/hyper_connection.py. The main branch of 2026-08-22
has only hyper-connections (`enable_mhc_connections`). There they have no parameters in FP32 and no
learned contraction.
"""

from __future__ import annotations

from dataclasses import dataclass

COMPRESSED_HYBRID = "dsv4_hybrid"
"""Value of `experimental_attention_variant` for the hybrid attention."""
WINDOW = "window"
"""The kind of a layer with ratio 0."""
COMPRESSED = "compressed"
"""The kind of a layer with ratio 4."""
COMPRESSED_DENSE = "compressed_dense"
"""The kind of a layer with ratio 4 and without an indexer (`csa_dense_mode`)."""
HEAVILY_COMPRESSED = "heavily_compressed"
"""The kind of a layer with ratio 128."""
COMPRESSION_RATIOS = {WINDOW: 0, COMPRESSED: 4, COMPRESSED_DENSE: 4, HEAVILY_COMPRESSED: 128}
"""Kind of a layer -> the number of tokens of one compressed key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedAttention:
    """The sizes of the hybrid attention that all of its layers share."""

    output_groups: int
    output_rank: int
    """The outputs of one group in the first of the two output projections."""

    @property
    def projected_width(self) -> int:
        """The outputs of all groups, which are the inputs of the second output projection."""
        return self.output_groups * self.output_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperConnections:
    """Several residual streams, and how they become a single stream after the last layer."""

    streams: int
    is_fp32: bool
    """Whether the modules that mix streams have FP32 parameters and compute in FP32."""
    is_contraction_learned: bool
    """Whether the streams are summed with learned weights after the last layer.

    False: the streams are averaged.
    """

    @property
    def mapped(self) -> int:
        """Values per token that a module computes to read, write and mix the streams."""
        return self.streams * (self.streams + 2)


def get_kind_of_ratio(ratio: int, *, is_dense: bool) -> str:
    """Return the kind of a layer with a ratio.

    Args:
        ratio: The ratio in `csa_compress_ratios`.
        is_dense: Whether `csa_dense_mode` is on.
    """
    if ratio == COMPRESSION_RATIOS[HEAVILY_COMPRESSED]:
        return HEAVILY_COMPRESSED
    if ratio != COMPRESSION_RATIOS[COMPRESSED]:
        return WINDOW
    if is_dense:
        return COMPRESSED_DENSE
    return COMPRESSED
