"""Dimensions of the attention variants that Megatron selects by `experimental_attention_variant`.

Source: megatron-core 0.16.1 and Megatron-LM main of 2026-08-22, ssm/gated_delta_net and
transformer/experimental_attention_variant/dsa.py.
"""

from dataclasses import dataclass

DELTA_NET = ("gated_delta_net", "gdn")
"""Values of the field for gated delta net."""
SPARSE = "dsa"
"""Its value for DeepSeek sparse attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaNet:
    """Gated delta net, the linear attention of a layer."""

    num_key_heads: int
    key_head_dim: int
    num_value_heads: int
    value_head_dim: int
    conv_width: int = 4

    @property
    def value(self) -> int:
        """Width of the values, and of the output gate."""
        return self.num_value_heads * self.value_head_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_head_dim + self.value

    @property
    def projected(self) -> int:
        """Outputs of the input projection: queries, keys, values, the gate, beta and alpha."""
        return self.convolved + self.value + 2 * self.num_value_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class Indexer:
    """The part of DeepSeek sparse attention that chooses the keys of each query."""

    num_heads: int
    head_dim: int
    topk: int
    share_every: int = 1
    """One layer of so many chooses, and the layers behind it take its choice."""
    share_from: int = 0
    """The last of the first layers that each choose, from 1."""

    def is_in_layer(self, number: int) -> bool:
        """Return whether a layer, counted from 1, chooses its own keys."""
        return max(number - max(self.share_from, 1), 0) % self.share_every == 0
