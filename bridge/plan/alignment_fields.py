"""Config fields behind a GEMM's dimensions, and how many times the field a dimension is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.plan.shape import ModelShape

__all__ = ["FIELDS"]

Origin = Callable[["ModelShape", int], tuple[str, int, int]]
"""Shape and the whole dimension -> field, its value, how many times the value the dimension is."""


def _field(name: str, value: Callable[[ModelShape], int]) -> Origin:
    def origin(shape: ModelShape, whole: int) -> tuple[str, int, int]:
        own = value(shape)
        exact = own > 0 and whole % own == 0
        return (f"model.{name}", own, whole // own) if exact else (f"model.{name} and others", whole, 1)

    return origin


_HIDDEN = _field("hidden_size", lambda shape: shape.hidden_size)
_FFN = _field("ffn_hidden_size", lambda shape: shape.ffn_hidden_size)
_CHANNELS = _field("kv_channels", lambda shape: shape.kv_channels)
_EXPERT = _field("moe_ffn_hidden_size", lambda shape: shape.experts.ffn_hidden_size if shape.experts else 0)
_SHARED = _field(
    "moe_shared_expert_intermediate_size",
    lambda shape: shape.experts.shared_ffn_hidden_size if shape.experts else 0,
)
_QUERY_RANK = _field("q_lora_rank", lambda shape: (shape.latent.q_lora_rank or 0) if shape.latent else 0)
_KEY_RANK = _field("kv_lora_rank", lambda shape: shape.latent.kv_lora_rank if shape.latent else 0)
_HEADS = _field("num_attention_heads", lambda shape: shape.num_attention_heads)
_MAMBA = _field("mamba_num_heads", lambda shape: shape.state_space.num_heads if shape.state_space else 0)


def _projection(shape: ModelShape, whole: int) -> tuple[str, int, int]:
    return (_CHANNELS if shape.latent is None else _HEADS)(shape, whole)


FIELDS: dict[tuple[str, str], Origin] = {
    ("linear_qkv", "K"): _HIDDEN,
    ("linear_qkv", "N"): _CHANNELS,
    ("linear_proj", "K"): _projection,
    ("linear_proj", "N"): _HIDDEN,
    ("linear_fc1", "K"): _HIDDEN,
    ("linear_fc1", "N"): _FFN,
    ("linear_fc2", "K"): _FFN,
    ("linear_fc2", "N"): _HIDDEN,
    ("experts.linear_fc1", "K"): _HIDDEN,
    ("experts.linear_fc1", "N"): _EXPERT,
    ("experts.linear_fc2", "K"): _EXPERT,
    ("experts.linear_fc2", "N"): _HIDDEN,
    ("shared_experts.linear_fc1", "K"): _HIDDEN,
    ("shared_experts.linear_fc1", "N"): _SHARED,
    ("shared_experts.linear_fc2", "K"): _SHARED,
    ("shared_experts.linear_fc2", "N"): _HIDDEN,
    ("linear_q_proj", "K"): _HIDDEN,
    ("linear_q_proj", "N"): _HEADS,
    ("linear_q_down_proj", "K"): _HIDDEN,
    ("linear_q_down_proj", "N"): _QUERY_RANK,
    ("linear_q_up_proj", "K"): _QUERY_RANK,
    ("linear_q_up_proj", "N"): _HEADS,
    ("linear_kv_down_proj", "K"): _HIDDEN,
    ("linear_kv_down_proj", "N"): _KEY_RANK,
    ("linear_kv_up_proj", "K"): _KEY_RANK,
    ("linear_kv_up_proj", "N"): _HEADS,
    ("in_proj", "K"): _HIDDEN,
    ("in_proj", "N"): _MAMBA,
    ("out_proj", "K"): _MAMBA,
    ("out_proj", "N"): _HIDDEN,
    ("eh_proj", "K"): _HIDDEN,
    ("eh_proj", "N"): _HIDDEN,
}
"""(module, dimension) -> where it comes from."""
