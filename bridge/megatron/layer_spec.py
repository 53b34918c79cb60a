"""Layer specs: Transformer Engine's modules where they work, Megatron's local ones elsewhere."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from bridge.megatron.attention import FusedDotProductAttention
from bridge.megatron.emulation.linear import (
    EmulatedColumnParallelLinear,
    EmulatedRowParallelLinear,
    KeptColumnParallelLinear,
    KeptRowParallelLinear,
    is_low_layer,
)
from bridge.precision.quant_recipe import quant_recipes

if TYPE_CHECKING:
    from collections.abc import Sequence


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


def _with_submodules(spec: Any, **replaced: Any) -> Any:
    """Return a module's spec with other submodules; from megatron-core 0.19 it may be a `partial` of the class."""
    if isinstance(spec, partial):
        submodules = dataclasses.replace(spec.keywords["submodules"], **replaced)
        return partial(spec.func, *spec.args, **{**spec.keywords, "submodules": submodules})
    return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, **replaced))


PLAIN: dict[str, Any] = {}
LOW = {"column": EmulatedColumnParallelLinear, "row": EmulatedRowParallelLinear}
KEPT = {"column": KeptColumnParallelLinear, "row": KeptRowParallelLinear}
"""Classes of the linear layers of a transformer layer: Megatron's own, or emulated ones."""


def _local_layer_spec(config: Any, linears: dict[str, Any]) -> Any:
    """Return Megatron's local layer, with norms that work under sequence parallelism and fused attention.

    Args:
        config: A `TransformerConfig`.
        linears: Classes of the column- and row-parallel layers; empty: Megatron's own.
    """
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    attention = spec.submodules.self_attention
    replaced: dict[str, Any] = {"core_attention": FusedDotProductAttention}
    if config.qk_layernorm:
        replaced |= {"q_layernorm": SequenceParallelNorm, "k_layernorm": SequenceParallelNorm}
    mlp = spec.submodules.mlp
    if linears:
        replaced |= {"linear_qkv": linears["column"], "linear_proj": linears["row"]}
        mlp = _with_submodules(mlp, linear_fc1=linears["column"], linear_fc2=linears["row"])
    attention = dataclasses.replace(attention, submodules=dataclasses.replace(attention.submodules, **replaced))
    submodules = dataclasses.replace(
        spec.submodules,
        input_layernorm=SequenceParallelNorm,
        pre_mlp_layernorm=SequenceParallelNorm,
        self_attention=attention,
        mlp=mlp,
    )
    return dataclasses.replace(spec, submodules=submodules)


def block_spec(config: Any, *, backend: str, vp_stage: int | None = None, phases: Sequence[Any] = ()) -> Any:
    """Return the spec of one model chunk's transformer block.

    Args:
        config: A `TransformerConfig`; `num_layers` counts the whole model, the spec holds this chunk's share.
        backend: te, emulated or local.
        vp_stage: Number of the chunk under interleaved pipeline parallelism.
        phases: The model configs of a precision schedule, one a phase; none without a schedule.

    Under `emulated` the layers that stay in BF16 all the time are Megatron's own; which these are is decided by their
    number in the whole model, by Megatron's `is_first_last_bf16_layer`. With a per-module recipe every linear layer is
    emulated, since the recipe may choose any.
    """
    if backend == "te":
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    is_emulated, has_choices = backend == "emulated", bool(quant_recipes(getattr(config, "quant_recipe", None)))
    kept = _local_layer_spec(config, KEPT if is_emulated and has_choices else PLAIN)
    low = _local_layer_spec(config, LOW) if is_emulated else kept
    phases = phases or (config,)
    layers = [
        low if any(is_low_layer(phase, number) for phase in phases) else kept
        for number in range(offset, offset + count)
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=SequenceParallelNorm)
