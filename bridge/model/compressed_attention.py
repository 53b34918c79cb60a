"""DeepSeek-V4's hybrid attention, and hyper-connections: parts beyond a transformer layer.

A layer of the hybrid attention attends to the tokens of a window and, by its ratio in
`csa_compress_ratios`, to the tokens before it in compressed form: 4 makes one key of four tokens,
of which an indexer chooses; 128 makes one key of 128 tokens, and all are attended to; 0 compresses
nothing.

Hyper-connections keep several residual streams. A module in front of each attention and each MLP
mixes them.

Source: Megatron-LM dev of 2026-08-21 (d48bd6be), transformer/experimental_attention_variant/csa.py
and deepseek_v4_hybrid_attention.py, transformer/hyper_connection.py; main of 2026-08-22 has the
last alone, under `enable_mhc_connections`, without the parameters in FP32 and the learned
contraction.
"""

from __future__ import annotations

from dataclasses import dataclass

COMPRESSED_HYBRID = "dsv4_hybrid"
"""Value of `experimental_attention_variant` for the hybrid attention."""
WINDOW = "window"
"""Kind of its layers with ratio 0."""
COMPRESSED = "compressed"
"""Kind of its layers with ratio 4."""
COMPRESSED_DENSE = "compressed_dense"
"""Kind of its layers with ratio 4 without an indexer (`csa_dense_mode`)."""
HEAVILY_COMPRESSED = "heavily_compressed"
"""Kind of its layers with ratio 128."""
COMPRESSION_RATIOS = {WINDOW: 0, COMPRESSED: 4, COMPRESSED_DENSE: 4, HEAVILY_COMPRESSED: 128}
"""Kind of a layer -> tokens that make one compressed key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedAttention:
    """The sizes of the hybrid attention that all of its layers share."""

    output_groups: int
    output_rank: int
    """Outputs of each group's part of the first of the two output projections."""

    @property
    def projected_width(self) -> int:
        """Outputs of all groups, which the second output projection takes."""
        return self.output_groups * self.output_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperConnections:
    """Several residual streams, and how they become one behind the last layer."""

    streams: int
    is_fp32: bool
    """The modules that mix streams keep their parameters in FP32, and compute in FP32."""
    is_contraction_learned: bool
    """The streams are summed with learned weights behind the last layer.

    Otherwise they are averaged.
    """

    @property
    def mapped(self) -> int:
        """Values per token that a module computes: to read, to write and to mix the streams."""
        return self.streams * (self.streams + 2)


def get_kind_of_ratio(ratio: int, *, is_dense: bool) -> str:
    """Return the kind of a layer by its ratio."""
    if ratio == COMPRESSION_RATIOS[HEAVILY_COMPRESSED]:
        return HEAVILY_COMPRESSED
    if ratio != COMPRESSION_RATIOS[COMPRESSED]:
        return WINDOW
    if is_dense:
        return COMPRESSED_DENSE
    return COMPRESSED
