"""Layer specs: Megatron's own spec functions, with Transformer Engine's modules or, elsewhere, its local ones.

The spec functions read the whole model config: experts, latent attention, norms of queries and keys, prediction layers.
Of a local spec the classes alone are replaced, at every depth: norms that work under sequence parallelism, fused
attention, latent attention. `emulate` puts emulated linear layers into the model that is built.
"""

import copy
import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    LNImpl,
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from bridge.megatron.attention import FusedDotProductAttention, LatentAttention
from bridge.megatron.hybrid.variants import with_variant


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
    """Return a part of a spec with other classes at every depth; from megatron-core 0.19 it may be a `partial`."""
    if isinstance(part, type):
        return classes.get(part, part)
    if isinstance(part, partial):
        keywords = {name: with_classes(value, classes) for name, value in part.keywords.items()}
        return partial(with_classes(part.func, classes), *part.args, **keywords)
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        parts = {field.name: with_classes(getattr(part, field.name), classes) for field in dataclasses.fields(part)}
        return dataclasses.replace(part, **parts)
    return part


def block_spec(config: Any, *, backend: str, vp_stage: int | None = None) -> Any:
    """Return the spec of one model chunk's transformer block.

    `num_layers` of the config counts the whole model, the spec holds this chunk's share.
    """
    with_te = backend in ("te", "te_cpu")
    spec = get_gpt_decoder_block_spec(
        config, with_te, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm, vp_stage=vp_stage
    )
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = with_variant(config, spec.layer_specs, first=offset, with_te=with_te)
    if with_te:
        return dataclasses.replace(spec, layer_specs=layers)
    layers = [with_classes(layer, LOCAL) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=SequenceParallelNorm)


def mtp_spec(config: Any, *, backend: str, vp_stage: int | None = None) -> Any:
    """Return the spec of a model chunk's multi-token-prediction layers, None where it has none; as `block_spec`.

    A prediction layer contains a transformer layer of the kind of the model's last one.
    """
    if not config.mtp_num_layers:
        return None
    with_te = backend in ("te", "te_cpu")
    layers = get_gpt_decoder_layer_specs(
        config, with_te, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm
    )
    whole = TransformerBlockSubmodules(layer_specs=with_variant(config, layers, first=0, with_te=with_te))
    spec = get_gpt_mtp_block_spec(config, whole, with_te, vp_stage=vp_stage)
    if with_te or spec is None:
        return spec
    return dataclasses.replace(spec, layer_specs=[with_classes(layer, LOCAL) for layer in spec.layer_specs])
