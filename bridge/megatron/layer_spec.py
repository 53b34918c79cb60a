"""Which modules a layer is made of: Transformer Engine's where they work, Megatron's local ones elsewhere."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from bridge.errors import BackendUnavailableError
from bridge.megatron.attention import FusedDotProductAttention
from bridge.megatron.device import has_cuda

__all__ = ["block_spec", "has_transformer_engine", "require_gemm_backend"]


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed and has a CUDA device to run on."""
    if not has_cuda():
        return False
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError):  # a package without its CUDA parts fails in any of these ways
        return False
    return True


def require_gemm_backend(config: Any) -> None:
    """Refuse a config whose low-precision matrix multiplications nothing here would run.

    Megatron Core without Transformer Engine accepts ``fp8`` and ``fp4`` and silently trains in high precision.

    Raises:
        BackendUnavailableError: `config.fp8` or `config.fp4` is set, and there is no backend for it.
    """
    for field, kind in (("fp8", "FP8"), ("fp4", "FP4")):
        value = getattr(config, field, None)
        if value and not has_transformer_engine():
            missing = "Transformer Engine cannot be loaded" if has_cuda() else "there is no CUDA device"
            raise BackendUnavailableError(
                f"model.{field}: {kind} matrix multiplications need Transformer Engine on a CUDA device, got {value!r} "
                f"and {missing}. Choose a recipe without {kind} (bf16_mixed, say), or run this one where "
                "Transformer Engine works."
            )


class SequenceParallelNorm:
    """Torch's norm under sequence parallelism: its parameters are marked so that their gradients are summed over TP.

    Megatron's `WrappedTorchNorm` refuses sequence parallelism, although a norm works on each token alone; all it lacks
    is the mark that `finalize_model_grads` looks for (distributed/finalize_model_grads.py:354 in 0.16.1).
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = WrappedTorchNorm(plain, hidden_size, eps, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def _local_layer_spec(config: Any) -> Any:
    """Return Megatron's local layer, with norms that work under sequence parallelism and fused attention."""
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    attention = spec.submodules.self_attention
    replaced: dict[str, Any] = {"core_attention": FusedDotProductAttention}
    if config.qk_layernorm:
        replaced |= {"q_layernorm": SequenceParallelNorm, "k_layernorm": SequenceParallelNorm}
    attention = dataclasses.replace(attention, submodules=dataclasses.replace(attention.submodules, **replaced))
    submodules = dataclasses.replace(
        spec.submodules,
        input_layernorm=SequenceParallelNorm,
        pre_mlp_layernorm=SequenceParallelNorm,
        self_attention=attention,
    )
    return dataclasses.replace(spec, submodules=submodules)


def block_spec(config: Any) -> Any:
    """Return the spec of this pipeline stage's transformer block.

    Args:
        config: A `TransformerConfig`; `num_layers` counts the whole model, the spec holds this stage's share.
    """
    if has_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    layers = [_local_layer_spec(config)] * get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=SequenceParallelNorm)
