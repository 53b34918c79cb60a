"""Attention variants: gated delta net and DeepSeek sparse attention, in the layers of Megatron's own block specs.

Megatron has specs of both for Transformer Engine's layers alone; `_local_attention` is the same ones of its own.
Source: megatron-core 0.16.1 models/gpt/experimental_attention_variant_module_specs.py, whose block spec has no sparse
attention before 0.18.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexer,
    DSAIndexerSubmodules,
    DSAttention,
    DSAttentionSubmodules,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from bridge.errors import RunConfigError
from bridge.rules.shape.variants import DELTA_NET


class WholeLinear:
    """Megatron's linear layer in the place of one of Transformer Engine's that is whole on every rank."""

    def __new__(cls, *args: Any, parallel_mode: str, **kwargs: Any) -> Any:
        """Return the layer."""
        del parallel_mode
        return ColumnParallelLinear(*args, gather_output=False, **kwargs)


def with_variant(config: Any, layers: Sequence[ModuleSpec], *, first: int, with_te: bool) -> list[ModuleSpec]:
    """Return layers of plain attention with the variant of a model config in those that have it.

    Args:
        config: The model config.
        layers: Specs of a chunk's layers.
        first: Number of the first of them in the whole model, from 0.
        with_te: Whether they are Transformer Engine's.
    """
    variant = config.experimental_attention_variant
    if variant is None:
        return list(layers)
    is_delta = variant in DELTA_NET
    if not is_delta and not config.bf16:
        rule = "must be on for sparse attention, whose indexer rotates BF16 alone"
        raise RunConfigError.of("model.bf16", rule, config.bf16, "Choose a recipe in BF16.")
    has_variant = specs.get_linear_attention_pattern(config) if is_delta else [True] * config.num_layers
    attention = _te_attention(config, is_delta=is_delta) if with_te else None
    return [
        _changed(layer, attention or _local_attention(layer, is_delta=is_delta), is_delta=is_delta, with_te=with_te)
        if has_variant[number]
        else layer
        for number, layer in enumerate(layers, start=first)
    ]


def _changed(layer: ModuleSpec, attention: ModuleSpec, *, is_delta: bool, with_te: bool) -> ModuleSpec:
    """Return a layer with another attention."""
    parts: dict[str, Any] = {"self_attention": attention}
    if is_delta and with_te:
        parts["input_layernorm"] = IdentityOp  # it is inside of the input projection
    elif is_delta:
        names = dict(layer.submodules.sharded_state_dict_keys_map)
        parts["sharded_state_dict_keys_map"] = names | {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, **parts))


def _te_attention(config: Any, *, is_delta: bool) -> ModuleSpec:
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider  # needs Transformer Engine

    spec = specs.get_gated_delta_net_module_spec if is_delta else specs.get_dsa_module_spec_for_backend
    return spec(config, TESpecProvider())


def _local_attention(layer: ModuleSpec, *, is_delta: bool) -> ModuleSpec:
    if is_delta:
        linear = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
        return ModuleSpec(module=GatedDeltaNet, submodules=GatedDeltaNetSubmodules(out_norm=WrappedTorchNorm, **linear))
    linears = dict.fromkeys(("linear_wq_b", "linear_wk", "linear_weights_proj"), WholeLinear)
    indexer = ModuleSpec(module=DSAIndexer, submodules=DSAIndexerSubmodules(k_norm=WrappedTorchNorm, **linears))
    core = ModuleSpec(module=DSAttention, submodules=DSAttentionSubmodules(indexer=indexer))
    latent = layer.submodules.self_attention
    return dataclasses.replace(latent, submodules=dataclasses.replace(latent.submodules, core_attention=core))
