"""Layer specs: Megatron's own spec functions, with Transformer Engine's modules or, elsewhere, its local ones.

The spec functions read the whole model config: experts, latent attention, norms of queries and keys, prediction layers.
Of a local spec the classes alone are replaced, at every depth: norms that work under sequence parallelism, fused
attention, latent attention. `emulate` puts emulated linear layers into the model that is built.
"""

import copy
import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
from megatron.core.models.gpt.gpt_layer_specs import (
    LNImpl,
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from bridge.errors import RunConfigError
from bridge.model.variants import DELTA_NET
from bridge.runtime.megatron.attention import FusedDotProductAttention, LatentAttention


class SequenceParallelNorm:
    """Torch's norm under sequence parallelism: its parameters are marked so that their gradients are summed over TP.

    Megatron's `WrappedTorchNorm` refuses sequence parallelism, although a norm works on each token alone; all it lacks
    is the mark that `finalize_model_grads` looks for (distributed/finalize_model_grads.py:354 in 0.16.1).
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
        """Return the marked norm."""
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = WrappedTorchNorm(plain, hidden_size, eps, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


LOCAL: Mapping[Any, Any] = {
    LNImpl: SequenceParallelNorm,
    WrappedTorchNorm: SequenceParallelNorm,
    DotProductAttention: FusedDotProductAttention,
    MLASelfAttention: LatentAttention,
}
"""Class of a local spec -> the class that takes its place."""


def with_classes(part: Any, classes: Mapping[Any, Any]) -> Any:
    """Return a part of a spec with other classes at every depth; from megatron-core 0.19 it may be a `partial`.

    Without Transformer Engine, Megatron's names of its classes are mocks, which are no types.
    """
    if isinstance(part, Hashable) and part in classes:
        return classes[part]
    if isinstance(part, partial):
        keywords = {name: with_classes(value, classes) for name, value in part.keywords.items()}
        return partial(with_classes(part.func, classes), *part.args, **keywords)
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        parts = {
            field.name: with_classes(getattr(part, field.name), classes)
            for field in dataclasses.fields(part)
        }
        return dataclasses.replace(part, **parts)
    return part


def block_spec(config: Any, *, backend: str, vp_stage: int | None = None) -> Any:
    """Return the spec of one model chunk's transformer block.

    `num_layers` of the config counts the whole model, the spec holds this chunk's share.
    """
    with_te = backend in ("te", "te_cpu")
    spec = get_gpt_decoder_block_spec(
        _plain(config),
        with_te,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = _with_variant(config, spec.layer_specs, first=offset, with_te=with_te)
    if with_te:
        return dataclasses.replace(spec, layer_specs=layers)
    layers = [with_classes(layer, LOCAL) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=SequenceParallelNorm)


def _plain(config: Any) -> Any:
    """Return a model config without an attention variant, which `_with_variant` puts into the layers."""
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    return plain


def mtp_spec(config: Any, *, backend: str, vp_stage: int | None = None) -> Any:
    """Return the spec of a model chunk's multi-token-prediction layers, None where it has none; as `block_spec`.

    A prediction layer contains a transformer layer of the kind of the model's last one.
    """
    if not config.mtp_num_layers:
        return None
    with_te = backend in ("te", "te_cpu")
    layers = get_gpt_decoder_layer_specs(
        _plain(config), with_te, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm
    )
    whole = TransformerBlockSubmodules(
        layer_specs=_with_variant(config, layers, first=0, with_te=with_te)
    )
    spec = get_gpt_mtp_block_spec(config, whole, with_te, vp_stage=vp_stage)
    if with_te or spec is None:
        return spec
    return dataclasses.replace(
        spec, layer_specs=[with_classes(layer, LOCAL) for layer in spec.layer_specs]
    )


class WholeLinear:
    """Megatron's linear layer in the place of one of Transformer Engine's that is whole on every rank."""

    def __new__(cls, *args: Any, parallel_mode: str, **kwargs: Any) -> Any:
        """Return the layer."""
        del parallel_mode
        return ColumnParallelLinear(*args, gather_output=False, **kwargs)


class _OwnLayers(LocalSpecProvider):  # type: ignore[misc]  # Megatron is untyped
    """Megatron's own layers, also in the places of Transformer Engine's that are whole or have a norm inside."""

    def linear(self) -> Any:
        return WholeLinear

    def column_parallel_layer_norm_linear(self) -> Any:
        return ColumnParallelLinear


def _with_variant(
    config: Any, layers: Sequence[ModuleSpec], *, first: int, with_te: bool
) -> list[ModuleSpec]:
    """Return layers of plain attention with the variant of a model config in those that have it.

    The variants are the gated delta net and DeepSeek sparse attention; `first` is the number of the first layer in the
    whole model, from 0. Megatron has specs of their attention, and no block spec with sparse attention.
    Source: megatron-core 0.16.1 models/gpt/experimental_attention_variant_module_specs.py.
    """
    variant = config.experimental_attention_variant
    if variant is None:
        return list(layers)
    is_delta = variant in DELTA_NET
    if not is_delta and not config.bf16:
        rule = "must be on for sparse attention, whose indexer rotates BF16 alone"
        raise RunConfigError.of("model.bf16", rule, config.bf16, "Choose a recipe in BF16.")
    has_variant = (
        specs.get_linear_attention_pattern(config) if is_delta else [True] * config.num_layers
    )
    spec = (
        specs.get_gated_delta_net_module_spec if is_delta else specs.get_dsa_module_spec_for_backend
    )
    attention = spec(config, specs.TESpecProvider() if with_te else _OwnLayers())
    return [
        _changed(layer, attention, is_delta=is_delta, with_te=with_te)
        if has_variant[number]
        else layer
        for number, layer in enumerate(layers, start=first)
    ]


def _changed(
    layer: ModuleSpec, attention: ModuleSpec, *, is_delta: bool, with_te: bool
) -> ModuleSpec:
    parts: dict[str, Any] = {"self_attention": attention}
    if is_delta and with_te:
        parts["input_layernorm"] = IdentityOp  # it is inside of the input projection
    elif is_delta:
        names = dict(layer.submodules.sharded_state_dict_keys_map)
        parts["sharded_state_dict_keys_map"] = names | {
            "input_layernorm.": "self_attention.in_proj.layer_norm_"
        }
    elif not with_te:  # the latents keep their norms in front of the up projections
        parts["self_attention"] = _with_core_of(layer.submodules.self_attention, attention)
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, **parts))


def _with_core_of(latent: ModuleSpec, sparse: ModuleSpec) -> ModuleSpec:
    """Return latent attention with the core of sparse attention, in the class that this core is made for.

    From megatron-core 0.19 on that is a class of its own, which multiplies with the weight of the up projection.
    """
    core = sparse.submodules.core_attention
    if sparse.module is latent.module:
        inside = dataclasses.replace(latent.submodules, core_attention=core)
        return dataclasses.replace(latent, submodules=inside)
    names = [
        field.name
        for field in dataclasses.fields(sparse.submodules)
        if hasattr(latent.submodules, field.name)
    ]
    own = {name: getattr(latent.submodules, name) for name in names}
    inside = dataclasses.replace(sparse.submodules, **{**own, "core_attention": core})
    return dataclasses.replace(sparse, submodules=inside)
