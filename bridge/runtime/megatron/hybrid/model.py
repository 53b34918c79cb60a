"""Hybrid models: Megatron's `MambaModel`, a stack of Mamba, attention, MLP and expert layers in the order of a pattern.

Megatron has a spec of Transformer Engine's layers alone; `local_stack` puts its own layers in their places. In both
every layer is one kind of block, and counts as a layer of the model.
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
from bridge.model.hybrid import HybridPattern
from bridge.runtime.megatron.attention import FusedDotProductAttention
from bridge.runtime.megatron.hybrid.kernels import SPECS
from bridge.runtime.megatron.layer_spec import LOCAL, SequenceParallelNorm, with_classes
from bridge.runtime.megatron.replacement import replaced

CLASSES = {
    te.TENorm: SequenceParallelNorm,
    te.TELayerNormColumnParallelLinear: ColumnParallelLinear,
    te.TERowParallelLinear: RowParallelLinear,
    te.TEDotProductAttention: FusedDotProductAttention,
}
"""Class of Megatron's spec, or what stands for it without Transformer Engine -> the class that takes its place."""
NORMS = {
    "mamba_layer": ("norm", "mixer.in_proj"),
    "attention_layer": ("input_layernorm", "self_attention.linear_qkv"),
    "mlp_layer": ("pre_mlp_layernorm", "mlp.linear_fc1"),
}
"""Layer -> its norm, and the linear layer behind it, under whose name a checkpoint keeps the norm."""


def stack_spec() -> Any:
    """Return Megatron's spec of a hybrid's layers. Without Triton, its module is there during a run alone."""
    return importlib.import_module(SPECS).mamba_stack_spec


def local_stack(config: Any) -> Any:
    """Return the layers of Megatron's `mamba_stack_spec` with its own in place of Transformer Engine's."""
    stack, layers = with_classes(stack_spec().submodules, CLASSES), {}
    for name, (norm, linear) in NORMS.items():
        layer = getattr(stack, name)
        parts = {
            norm: SequenceParallelNorm,
            "sharded_state_dict_keys_map": {f"{norm}.": f"{linear}.layer_norm_"},
        }
        layers[name] = replace(layer, submodules=replace(layer.submodules, **parts))
    experts = get_moe_module_spec(
        use_te=False, num_experts=config.num_moe_experts or 1, moe_grouped_gemm=False
    )
    inside = replace(stack.moe_layer.submodules, mlp=with_classes(experts, LOCAL))
    return replace(stack, moe_layer=replace(stack.moe_layer, submodules=inside), **layers)


def build_hybrid(config: Any, *, backend: str, **model: Any) -> Any:
    """Return this rank's `MambaModel` of a `GPTConfig` with a hybrid pattern; `model` has its other arguments."""
    pattern = HybridPattern.of(config) or HybridPattern(layers="")
    if pattern.faults:
        raise RunConfigError("\n".join(map(str, pattern.faults)))
    arguments = {"config": config, "hybrid_override_pattern": pattern.layers, **model}
    if backend in ("te", "te_cpu"):
        return MambaModel(mamba_stack_spec=stack_spec(), **arguments)
    stack = replace(stack_spec(), submodules=local_stack(config))
    block = sys.modules[stack.module.__module__]
    with replaced([(block, "TENorm", SequenceParallelNorm)]):  # of the last norm, which no spec has
        return MambaModel(mamba_stack_spec=stack, **arguments)
