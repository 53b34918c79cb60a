"""`ModelShape`: the sizes of a model, and the kinds of its layers.

`bridge.model.shape_reader` reads it from a model config.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridge.model.attention_variants import DeltaNet, Indexer
from bridge.model.compressed_attention import CompressedAttention, HyperConnections

TRANSFORMER_KIND = "transformer"
"""The kind of a layer with attention and a dense MLP."""
MOE_SUFFIX = "moe"
"""The suffix of the kind of a layer with experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The sizes of the mixture of experts, which all layers with experts share."""

    num_experts: int
    ffn_hidden_size: int
    topk: int
    shared_ffn_hidden_size: int = 0
    """The width of the shared expert. 0: the model has no shared expert."""
    shared_gate: bool = False
    router_bias: bool = False
    latent_size: int | None = None
    """The width to which tokens are projected before they are sent to the experts.

    None: tokens are not projected.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """The sizes of multi-latent attention."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpace:
    """The sizes of the Mamba-2 mixer."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    conv_width: int = 4

    @property
    def inner(self) -> int:
        """Width of the mixer."""
        return self.num_heads * self.head_dim

    @property
    def projected_width(self) -> int:
        """Outputs of the input projection: z, x, B, C and dt."""
        return 2 * self.inner + 2 * self.num_groups * self.state_dim + self.num_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a model, and the kind of each layer."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    kinds: tuple[str, ...]
    """The kind of each layer.

    In a hybrid model it is mamba, attention, latent_attention, mlp or moe. In another model it is
    transformer, delta_net, sparse, sparse_shared (a layer that uses the choice of keys of another
    layer) or a kind of `COMPRESSION_RATIOS`. A layer with experts has the suffix _moe.
    """
    is_hybrid: bool = False
    """Whether the model is a hybrid: each layer is a single block, a letter of the pattern."""
    vocab_size: int = 0
    """The number of tokens of the vocabulary before padding. 0: not known."""
    make_vocab_size_divisible_by: int = 128
    seq_length: int = 0
    """The number of tokens of a sample. 0: not known."""
    gated_linear_unit: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    layer_norm_bias: bool = True
    """Whether norms have a bias. LayerNorm has one, RMSNorm has none."""
    qk_layernorm: bool = False
    qk_l2_norm: bool = False
    """Whether queries and keys have norms without weights, instead of `qk_layernorm`."""
    attention_output_gate: bool = False
    has_softmax_offset: bool = False
    """Whether each head has a learned offset of its softmax (`softmax_type=learnable`)."""
    position_embedding_type: str = "rope"
    share_embeddings_and_output_weights: bool = False
    mtp_num_layers: int = 0
    """The number of multi-token-prediction depths. Each is a pass through a prediction layer."""
    mtp_is_repeated: bool = False
    mtp_kind: str = TRANSFORMER_KIND
    """The kind of the layer inside a prediction layer. A hybrid model has `mtp_kinds` instead."""
    mtp_kinds: tuple[str, ...] = ()
    """The kind of each layer inside a prediction layer of a hybrid model."""
    experts: Experts | None = None
    latent: Latent | None = None
    state_space: StateSpace | None = None
    delta_net: DeltaNet | None = None
    indexer: Indexer | None = None
    compressed: CompressedAttention | None = None
    hyper_connections: HyperConnections | None = None

    @property
    def is_moe(self) -> bool:
        """Whether some layers have experts."""
        return self.experts is not None

    @property
    def has_mtp(self) -> bool:
        """Whether the model has multi-token prediction."""
        return self.mtp_num_layers > 0

    @property
    def mtp_layers(self) -> int:
        """The number of prediction layers."""
        if self.mtp_is_repeated:
            return min(1, self.mtp_num_layers)
        return self.mtp_num_layers

    def padded_vocab_size(self, tensor_parallel: int = 1) -> int:
        """Return the number of rows of the embedding, over all tensor-parallel ranks."""
        multiple = self.make_vocab_size_divisible_by * tensor_parallel
        return -(-self.vocab_size // multiple) * multiple


def make_moe_kind(kind: str) -> str:
    """Return the kind of a layer with the same attention and with experts instead of a dense MLP."""
    return f"{kind}_{MOE_SUFFIX}"


def get_attention_kind(kind: str) -> str:
    """Return the kind of a layer with the same attention and a dense MLP."""
    return kind.removesuffix(f"_{MOE_SUFFIX}")


def is_moe_kind(kind: str) -> bool:
    """Return whether layers of a kind (`ModelShape.kinds`) have experts."""
    return kind.endswith(MOE_SUFFIX)
