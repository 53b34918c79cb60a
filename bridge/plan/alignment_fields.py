"""Config fields behind a GEMM's dimensions, and how many times the field a dimension is."""

from collections.abc import Callable
from typing import NamedTuple

from bridge.rules.shape.model import ModelShape


class Field(NamedTuple):
    """The field behind a dimension."""

    name: str
    value: int
    factor: int = 1
    """How many times the value the dimension is."""


Origin = Callable[["ModelShape", int], Field]
"""Shape and the whole dimension -> the field behind it."""


def _field(name: str, value: Callable[[ModelShape], int]) -> Origin:
    def origin(shape: ModelShape, whole: int) -> Field:
        own = value(shape)
        exact = own > 0 and whole % own == 0
        return Field(f"model.{name}", own, whole // own) if exact else Field(f"model.{name} and others", whole)

    return origin


_HIDDEN = _field("hidden_size", lambda shape: shape.hidden_size)
_FFN = _field("ffn_hidden_size", lambda shape: shape.ffn_hidden_size)
_CHANNELS = _field("kv_channels", lambda shape: shape.kv_channels)
_EXPERT = _field("moe_ffn_hidden_size", lambda shape: shape.experts.ffn_hidden_size if shape.experts else 0)
_LATENT = _field("moe_latent_size", lambda shape: (shape.experts.latent_size or 0) if shape.experts else 0)
_SHARED = _field(
    "moe_shared_expert_intermediate_size", lambda shape: shape.experts.shared_ffn_hidden_size if shape.experts else 0
)
_QUERY_RANK = _field("q_lora_rank", lambda shape: (shape.latent.q_lora_rank or 0) if shape.latent else 0)
_KEY_RANK = _field("kv_lora_rank", lambda shape: shape.latent.kv_lora_rank if shape.latent else 0)
_HEADS = _field("num_attention_heads", lambda shape: shape.num_attention_heads)
_MAMBA = _field("mamba_num_heads", lambda shape: shape.state_space.num_heads if shape.state_space else 0)


_DELTA = _field("linear_num_value_heads", lambda shape: shape.delta_net.num_value_heads if shape.delta_net else 0)
_INDEXER = _field("dsa_indexer_n_heads", lambda shape: shape.indexer.num_heads if shape.indexer else 0)
_INDEX = _field("dsa_indexer_head_dim", lambda shape: shape.indexer.head_dim if shape.indexer else 0)


def _mixer(shape: ModelShape, whole: int) -> Field:
    return (_MAMBA if shape.delta_net is None else _DELTA)(shape, whole)


def _projection(shape: ModelShape, whole: int) -> Field:
    return (_CHANNELS if shape.latent is None else _HEADS)(shape, whole)


def _token(shape: ModelShape, whole: int) -> Field:
    """Return the field behind the width at which experts take tokens."""
    return (_LATENT if shape.experts and shape.experts.latent_size else _HIDDEN)(shape, whole)


_OF_MODULE = {
    "linear_qkv": (_CHANNELS, _HIDDEN),
    "linear_proj": (_HIDDEN, _projection),
    "linear_fc1": (_FFN, _HIDDEN),
    "linear_fc2": (_HIDDEN, _FFN),
    "experts.linear_fc1": (_EXPERT, _token),
    "experts.linear_fc2": (_token, _EXPERT),
    "fc1_latent_proj": (_LATENT, _HIDDEN),
    "fc2_latent_proj": (_HIDDEN, _LATENT),
    "shared_experts.linear_fc1": (_SHARED, _HIDDEN),
    "shared_experts.linear_fc2": (_HIDDEN, _SHARED),
    "linear_q_proj": (_HEADS, _HIDDEN),
    "linear_q_down_proj": (_QUERY_RANK, _HIDDEN),
    "linear_q_up_proj": (_HEADS, _QUERY_RANK),
    "linear_kv_down_proj": (_KEY_RANK, _HIDDEN),
    "linear_kv_up_proj": (_HEADS, _KEY_RANK),
    "linear_wq_b": (_INDEXER, _QUERY_RANK),
    "linear_wk": (_INDEX, _HIDDEN),
    "linear_weights_proj": (_INDEXER, _HIDDEN),
    "in_proj": (_mixer, _HIDDEN),
    "out_proj": (_HIDDEN, _mixer),
    "eh_proj": (_HIDDEN, _HIDDEN),
}
"""Module -> where its N and its K come from."""
FIELDS: dict[tuple[str, str], Origin] = {
    (module, dimension): origin
    for module, origins in _OF_MODULE.items()
    for dimension, origin in zip("NK", origins, strict=True)
}
