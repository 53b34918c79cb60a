"""DeepSeek-V4's hybrid attention, and hyper-connections: parts that a config names beyond a transformer layer.

A layer of the hybrid attention attends to the tokens of a window and, by its ratio in `csa_compress_ratios`, to the
tokens before it in compressed form: 4 makes one key of four tokens, of which an indexer chooses; 128 makes one key of
128 tokens, and all are attended to; 0 compresses nothing.

Hyper-connections keep several residual streams. A module in front of each attention and each MLP mixes them.

Source: Megatron-LM dev of 2026-08-21 (d48bd6be), transformer/experimental_attention_variant/csa.py and
deepseek_v4_hybrid_attention.py, transformer/hyper_connection.py; main of 2026-08-22 has the last alone, under
`enable_mhc_connections`, without the parameters in FP32 and the learned contraction.
"""

from __future__ import annotations

from dataclasses import dataclass

COMPRESSED_HYBRID = "dsv4_hybrid"
"""Value of `experimental_attention_variant` for the hybrid attention."""
WINDOW, COMPRESSED, COMPRESSED_DENSE, HEAVILY = (
    "window",
    "compressed",
    "compressed_dense",
    "heavily_compressed",
)
"""Kinds of its layers: ratio 0, ratio 4, ratio 4 without an indexer (`csa_dense_mode`), and ratio 128."""
RATIOS = {WINDOW: 0, COMPRESSED: 4, COMPRESSED_DENSE: 4, HEAVILY: 128}
"""Kind of a layer -> tokens that make one compressed key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedAttention:
    """The sizes of the hybrid attention that all of its layers share."""

    output_groups: int
    output_rank: int
    """Outputs of each group's part of the first of the two output projections."""

    @property
    def projected(self) -> int:
        """Outputs of all groups, which the second output projection takes."""
        return self.output_groups * self.output_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperConnections:
    """Several residual streams, and how they become one behind the last layer."""

    streams: int
    is_fp32: bool
    """The modules that mix streams keep their parameters in FP32, and compute in FP32."""
    is_contraction_learned: bool
    """The streams are summed with learned weights behind the last layer; otherwise they are averaged."""

    @property
    def mapped(self) -> int:
        """Values per token that a module computes: what is read of each stream, written to each, and mixed."""
        return self.streams * (self.streams + 2)


def kind_of_ratio(ratio: int, *, is_dense: bool) -> str:
    """Return the kind of a layer by its ratio."""
    if ratio == RATIOS[COMPRESSED]:
        return COMPRESSED_DENSE if is_dense else COMPRESSED
    return HEAVILY if ratio == RATIOS[HEAVILY] else WINDOW
