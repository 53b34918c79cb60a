"""Hybrid models: Megatron's `MambaModel`, a stack of Mamba, attention, MLP and expert layers in the order of a pattern.

Megatron has a spec of Transformer Engine's layers alone; `local_stack` is the same one of its own layers. In both every
layer is one kind of block, and counts as a layer of the model.
"""

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.mamba import MambaModel
from megatron.core.ssm import mamba_block
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from bridge.errors import RunConfigError
from bridge.megatron.layer_spec import LOCAL, SequenceParallelNorm, with_classes
from bridge.megatron.replacement import replaced
from bridge.rules.shape.hybrid import HybridPattern


def local_stack(config: Any) -> MambaStackSubmodules:
    """Return Megatron's `mamba_stack_spec` with its own layers in place of Transformer Engine's.

    Those have the norm inside of the linear layer behind it, under whose name a checkpoint keeps it.
    """
    residual = get_bias_dropout_add
    linear = {"linear_fc1": ColumnParallelLinear, "linear_fc2": RowParallelLinear}
    core = {"core_attention": DotProductAttention, "linear_proj": RowParallelLinear}
    attention = SelfAttentionSubmodules(linear_qkv=ColumnParallelLinear, **core)
    causal = {"attn_mask_type": AttnMaskType.causal}
    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    experts = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts or 1, moe_grouped_gemm=False)
    return MambaStackSubmodules(
        mamba_layer=ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=WrappedTorchNorm,
                mixer=ModuleSpec(module=MambaMixer, submodules=mixer),
                mamba_bda=residual,
                sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
            ),
        ),
        attention_layer=_layer(
            TransformerLayer,
            "input_layernorm",
            "self_attention.linear_qkv",
            self_attention=ModuleSpec(module=SelfAttention, params=causal, submodules=attention),
            self_attn_bda=residual,
        ),
        mlp_layer=_layer(
            MLPLayer,
            "pre_mlp_layernorm",
            "mlp.linear_fc1",
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(**linear)),
            mlp_bda=residual,
        ),
        moe_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(pre_mlp_layernorm=WrappedTorchNorm, mlp=experts, mlp_bda=residual),
        ),
    )


def _layer(module: type, norm: str, linear: str, **parts: Any) -> ModuleSpec:
    """Return a layer with a norm, which a checkpoint keeps under the name of the linear layer behind it."""
    parts |= {norm: WrappedTorchNorm, "sharded_state_dict_keys_map": {f"{norm}.": f"{linear}.layer_norm_"}}
    return ModuleSpec(module=module, submodules=TransformerLayerSubmodules(**parts))


def build_hybrid(config: Any, *, backend: str, **model: Any) -> Any:
    """Return this rank's `MambaModel` of a `GPTConfig` with a hybrid pattern; `model` has its other arguments."""
    pattern = HybridPattern.of(config) or HybridPattern(layers="")
    if pattern.faults:
        raise RunConfigError("\n".join(map(str, pattern.faults)))
    arguments = {"config": config, "hybrid_override_pattern": pattern.layers, **model}
    if backend in ("te", "te_cpu"):
        from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec  # needs Transformer Engine

        return MambaModel(mamba_stack_spec=mamba_stack_spec, **arguments)
    stack = ModuleSpec(module=MambaStack, submodules=with_classes(local_stack(config), LOCAL))
    with replaced([(mamba_block, "TENorm", SequenceParallelNorm)]):  # of the last norm, which no spec has
        return MambaModel(mamba_stack_spec=stack, **arguments)
