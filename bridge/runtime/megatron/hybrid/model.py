"""Hybrid models: Megatron's `MambaModel`.

It is a stack of Mamba, attention, MLP and expert layers in the order of a pattern. Megatron has a
spec with Transformer Engine's layers alone. `build_local_stack` replaces these by Megatron's local layers.
Each block of the stack is a Mamba, attention, MLP or expert layer, and counts as a layer of the
model.
"""

import importlib
import sys
from dataclasses import replace
from typing import Any

from megatron.core.extensions import transformer_engine as te
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.mamba import MambaModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from bridge.errors import RunConfigError
from bridge.model.hybrid_pattern import HybridPattern
from bridge.runtime.megatron.fused_attention import FusedDotProductAttention
from bridge.runtime.megatron.hybrid.kernels import MAMBA_SPECS_MODULE
from bridge.runtime.megatron.layer_spec import LOCAL_CLASSES, SequenceParallelNorm, replace_classes
from bridge.runtime.megatron.patching import apply_patches

TE_TO_LOCAL_CLASSES = {
    te.TENorm: SequenceParallelNorm,
    te.TELayerNormColumnParallelLinear: ColumnParallelLinear,
    te.TERowParallelLinear: RowParallelLinear,
    te.TEDotProductAttention: FusedDotProductAttention,
}
"""Class of Megatron's spec, or its mock without Transformer Engine -> class of the local layer."""
NORM_AND_LINEAR_NAMES = {
    "mamba_layer": ("norm", "mixer.in_proj"),
    "attention_layer": ("input_layernorm", "self_attention.linear_qkv"),
    "mlp_layer": ("pre_mlp_layernorm", "mlp.linear_fc1"),
}
"""Layer -> its norm, and the linear layer behind the norm, whose name the norm has in a checkpoint."""


def get_stack_spec() -> Any:
    """Return Megatron's spec of a hybrid's layers; without Triton it exists inside of a run alone."""
    return importlib.import_module(MAMBA_SPECS_MODULE).mamba_stack_spec


def build_local_stack(config: Any) -> Any:
    """Return the layers of Megatron's `mamba_stack_spec` with local layers in place of TE's."""
    stack = replace_classes(get_stack_spec().submodules, TE_TO_LOCAL_CLASSES)
    layers = {}
    for name, (norm, linear) in NORM_AND_LINEAR_NAMES.items():
        layer = getattr(stack, name)
        parts = {
            norm: SequenceParallelNorm,
            "sharded_state_dict_keys_map": {f"{norm}.": f"{linear}.layer_norm_"},
        }
        layers[name] = replace(layer, submodules=replace(layer.submodules, **parts))
    experts = get_moe_module_spec(
        use_te=False, num_experts=config.num_moe_experts or 1, moe_grouped_gemm=False
    )
    inside = replace(stack.moe_layer.submodules, mlp=replace_classes(experts, LOCAL_CLASSES))
    return replace(stack, moe_layer=replace(stack.moe_layer, submodules=inside), **layers)


def build_hybrid(config: Any, *, backend: str, **model: Any) -> Any:
    """Return this rank's `MambaModel` of a `GPTConfig` with a hybrid pattern.

    Args:
        config: The model config.
        backend: Backend of the GEMMs.
        **model: Further arguments of `MambaModel`.

    Raises:
        RunConfigError: The pattern is not valid.
    """
    pattern = HybridPattern.from_model(config) or HybridPattern(layers="")
    if pattern.faults:
        raise RunConfigError("\n".join(map(str, pattern.faults)))
    arguments = {"config": config, "hybrid_override_pattern": pattern.layers, **model}
    if backend in ("te", "te_cpu"):
        return MambaModel(mamba_stack_spec=get_stack_spec(), **arguments)
    stack = replace(get_stack_spec(), submodules=build_local_stack(config))
    block = sys.modules[stack.module.__module__]
    with apply_patches(
        [(block, "TENorm", SequenceParallelNorm)]
    ):  # of the last norm, which no spec has
        return MambaModel(mamba_stack_spec=stack, **arguments)
