"""Megatron's multi-latent attention with emulated linear layers.

Megatron's local down projections are column-parallel: each tensor-parallel rank computes its part of the latent, and
the parts are gathered. Transformer Engine's are whole on each rank. So under tensor parallelism a scale of a whole
tensor covers a rank's part of the down projection's weight here, and the whole weight there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

_DOWN = ("linear_q_down_proj", "linear_kv_down_proj")
"""Submodules that Megatron's constructor accepts of its own classes alone (multi_latent_attention.py:408 in 0.16.1)."""


class EmulatedLatentAttention(MLASelfAttention):  # type: ignore[misc]  # Megatron is untyped
    """`MLASelfAttention` whose down projections are of the classes in its spec, like its other linear layers."""

    def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        plain = dataclasses.replace(submodules, **dict.fromkeys(_DOWN, ColumnParallelLinear))
        super().__init__(config, plain, *args, **kwargs)
        for name in _DOWN:
            if hasattr(self, name):  # without q_lora_rank queries are projected at once
                getattr(submodules, name).adopt(getattr(self, name))
