"""Layer specs, made by Megatron's spec functions.

The layers are Transformer Engine's, or Megatron's local layers under the other backends. The spec
functions read the whole model config: experts, latent attention, norms of queries and keys,
prediction layers. In a local spec some classes are replaced, at every depth (`LOCAL_CLASSES`). The
emulated linear layers are not in a spec: `emulation/emulated_model.py` puts them into the built
model.
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
from bridge.model.attention_variants import DELTA_NET_VARIANTS
from bridge.runtime.megatron.attention.fused_attention import FusedDotProductAttention
from bridge.runtime.megatron.attention.latent_attention import LatentAttention


class SequenceParallelNorm:
    """Torch's norm with parameters whose gradients are summed over tensor-parallel ranks.

    Megatron's `WrappedTorchNorm` refuses sequence parallelism, although a norm works on each token
    separately. Its parameters only lack the mark `sequence_parallel`, by which
    `finalize_model_grads` recognises such gradients (distributed/finalize_model_grads.py:354 in
    0.16.1).

    A spec needs a class here. A call returns Megatron's `WrappedTorchNorm`, and never an instance
    of this class.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
        """Return Megatron's norm with marked parameters."""
        accepted_config = copy.copy(config)
        accepted_config.sequence_parallel = False
        norm = WrappedTorchNorm(accepted_config, hidden_size, eps, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


LOCAL_CLASSES: Mapping[Any, Any] = {
    LNImpl: SequenceParallelNorm,
    WrappedTorchNorm: SequenceParallelNorm,
    DotProductAttention: FusedDotProductAttention,
    MLASelfAttention: LatentAttention,
}
"""Class of a local spec -> the class that replaces it.

The linear layers are not among them. Only the built model knows the numbers of its layers, and so
which of them are emulated.
"""


def replace_classes(part: Any, classes: Mapping[Any, Any]) -> Any:
    """Return a part of a spec with other classes at every depth.

    Args:
        part: A spec, its submodules, a class, or from megatron-core 0.19 on a `partial`.
        classes: Class -> the class that replaces it. Without Transformer Engine, Megatron's
            names of its classes are mocks, which are not types.
    """
    if isinstance(part, Hashable) and part in classes:
        return classes[part]
    if isinstance(part, partial):
        keywords = {name: replace_classes(value, classes) for name, value in part.keywords.items()}
        return partial(replace_classes(part.func, classes), *part.args, **keywords)
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        values = {}
        for field in dataclasses.fields(part):
            values[field.name] = replace_classes(getattr(part, field.name), classes)
        return dataclasses.replace(part, **values)
    return part


def build_block_spec(config: Any, *, backend: str, vp_stage: int | None = None) -> Any:
    """Return the spec of the transformer block of a model chunk, with only the chunk's layers.

    Args:
        config: Config of the whole model.
        backend: Name of the backend of the GEMMs.
        vp_stage: Number of the chunk in an interleaved pipeline.
    """
    with_te = backend in ("te", "te_cpu")
    spec = get_gpt_decoder_block_spec(
        _drop_attention_variant(config),
        with_te,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = _apply_attention_variant(config, spec.layer_specs, first=offset, with_te=with_te)
    if with_te:
        return dataclasses.replace(spec, layer_specs=layers)
    layers = [replace_classes(layer, LOCAL_CLASSES) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=SequenceParallelNorm)


def _drop_attention_variant(config: Any) -> Any:
    """Return a model config without an attention variant.

    `_apply_attention_variant` puts the variant into the layers.
    """
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    return plain


def build_mtp_spec(config: Any, *, backend: str, vp_stage: int | None = None) -> Any:
    """Return the spec of a chunk's multi-token-prediction layers, or None for a chunk without them.

    The arguments are the same as for `build_block_spec`. The transformer layer inside a prediction
    layer has the spec of the model's last layer.
    """
    if not config.mtp_num_layers:
        return None
    with_te = backend in ("te", "te_cpu")
    layers = get_gpt_decoder_layer_specs(
        _drop_attention_variant(config),
        with_te,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )
    layers = _apply_attention_variant(config, layers, first=0, with_te=with_te)
    model_layers = TransformerBlockSubmodules(layer_specs=layers)
    spec = get_gpt_mtp_block_spec(config, model_layers, with_te, vp_stage=vp_stage)
    if with_te or spec is None:
        return spec
    layers = [replace_classes(layer, LOCAL_CLASSES) for layer in spec.layer_specs]
    return dataclasses.replace(spec, layer_specs=layers)


class WholeLinear:
    """Megatron's linear layer in place of a layer of TE that is whole on every rank."""

    def __new__(cls, *args: Any, parallel_mode: str, **kwargs: Any) -> Any:
        """Return the layer."""
        del parallel_mode
        return ColumnParallelLinear(*args, gather_output=False, **kwargs)


class _LocalLayerProvider(LocalSpecProvider):  # type: ignore[misc]  # Megatron is untyped
    """Megatron's local layers, with layers for two kinds that only Transformer Engine has.

    These are linear layers that are whole on every rank, and linear layers with a norm inside.
    """

    def linear(self) -> Any:
        return WholeLinear

    def column_parallel_layer_norm_linear(self) -> Any:
        return ColumnParallelLinear


def _apply_attention_variant(
    config: Any, layers: Sequence[ModuleSpec], *, first: int, with_te: bool
) -> list[ModuleSpec]:
    """Return layers with the attention variant of a model config, where the config has it.

    The variants are the gated delta net and DeepSeek sparse attention. Megatron has specs of their
    attention, and no spec of a block with sparse attention.

    Args:
        config: The model config.
        layers: Layers with plain attention.
        first: Number of the first of these layers in the whole model, from 0.
        with_te: Whether the layers are Transformer Engine's.

    Raises:
        RunConfigError: The run has sparse attention and is not in BF16.

    Source: megatron-core 0.16.1 models/gpt/experimental_attention_variant_module_specs.py.
    """
    variant = config.experimental_attention_variant
    if variant is None:
        return list(layers)
    provider = _LocalLayerProvider()
    if with_te:
        provider = specs.TESpecProvider()
    is_delta = variant in DELTA_NET_VARIANTS
    if is_delta:
        has_variant = specs.get_linear_attention_pattern(config)
        attention = specs.get_gated_delta_net_module_spec(config, provider)
    elif config.bf16:
        has_variant = [True] * config.num_layers
        attention = specs.get_dsa_module_spec_for_backend(config, provider)
    else:
        rule = "must be on for sparse attention, whose indexer rotates BF16 alone"
        raise RunConfigError.of("model.bf16", rule, config.bf16, "Choose a recipe in BF16.")
    changed = []
    for number, layer in enumerate(layers, start=first):
        if has_variant[number]:
            changed.append(_replace_attention(layer, attention, is_delta=is_delta, with_te=with_te))
        else:
            changed.append(layer)
    return changed


def _replace_attention(
    layer: ModuleSpec, attention: ModuleSpec, *, is_delta: bool, with_te: bool
) -> ModuleSpec:
    """Return a layer with another attention, which the other arguments describe."""
    parts: dict[str, Any] = {"self_attention": attention}
    if is_delta and with_te:
        parts["input_layernorm"] = IdentityOp  # the norm is inside of the input projection
    elif is_delta:
        # In a checkpoint the norm has the name that it has inside of the input projection.
        names = dict(layer.submodules.sharded_state_dict_keys_map)
        parts["sharded_state_dict_keys_map"] = names | {
            "input_layernorm.": "self_attention.in_proj.layer_norm_"
        }
    elif not with_te:  # the latents keep their norms before the up projections
        parts["self_attention"] = _replace_core_attention(
            layer.submodules.self_attention, attention
        )
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, **parts))


def _replace_core_attention(latent: ModuleSpec, sparse: ModuleSpec) -> ModuleSpec:
    """Return a spec of latent attention with the core of sparse attention.

    From megatron-core 0.19 on sparse attention has a separate class of latent attention, which
    multiplies with the weight of the up projection. The result then has this class.
    """
    core = sparse.submodules.core_attention
    if sparse.module is latent.module:
        submodules = dataclasses.replace(latent.submodules, core_attention=core)
        return dataclasses.replace(latent, submodules=submodules)
    parts = {}
    for field in dataclasses.fields(sparse.submodules):
        if hasattr(latent.submodules, field.name):
            parts[field.name] = getattr(latent.submodules, field.name)
    parts["core_attention"] = core
    submodules = dataclasses.replace(sparse.submodules, **parts)
    return dataclasses.replace(sparse, submodules=submodules)
