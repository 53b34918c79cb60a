"""NVFP4: E2M1 values with one E4M3 scale per 16 of them, under one FP32 scale per tensor."""

from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import register

from .unscaled import bf16_mixed

__all__ = [
    "bf16_with_nvfp4_mixed",
    "nemotron_3_super_bf16_with_nvfp4_mixed",
    "nemotron_3_ultra_bf16_with_nvfp4_mixed",
]


@register(tags=("fp4", "nvfp4", "bf16"), aliases=("nvfp4",))
def bf16_with_nvfp4_mixed() -> MixedPrecisionConfig:
    """BF16 with NVFP4 matmuls and weights stored in NVFP4.

    Formats: E2M1 in every operand with E4M3 block scales; BF16 outside the linears; FP32 master weights and gradients.
    Scheme: nvfp4, blocks of 16, weights in 16x16; random Hadamard transform and stochastic rounding for gradients.
    Hardware: compute capability 10.x (Blackwell); Transformer Engine 2.7; storing weights in FP4: megatron-core 0.17.1.
    Status: experimental; Llama-3-8B was pretrained with it for 1T tokens (Megatron Bridge pull request 1178).
    Source: Megatron Bridge, recipe of the same name, snapshot 2026-08-22.
    """
    return bf16_mixed().override(fp4="e2m1", fp4_recipe="nvfp4", fp4_param_gather=True)


@register(tags=("fp4", "nvfp4", "bf16", "nemotron"))
def nemotron_3_super_bf16_with_nvfp4_mixed() -> MixedPrecisionConfig:
    """BF16 with NVFP4 matmuls; the last fourteen layers stay in BF16.

    Formats: E2M1 in every operand with E4M3 block scales; BF16 outside the linears; FP32 master weights and gradients.
    Scheme: nvfp4, weights stored in NVFP4; needs a model of more than fourteen layers.
    Hardware: compute capability 10.x (Blackwell); Transformer Engine 2.7; storing weights in FP4: megatron-core 0.17.1.
    Status: validated by its authors for Nemotron 3 Super.
    Source: Megatron Bridge, recipe of the same name, snapshot 2026-08-22.
    """
    return bf16_with_nvfp4_mixed().override(
        first_last_layers_bf16=True,
        num_layers_at_start_in_bf16=0,
        num_layers_at_end_in_bf16=14,
    )


@register(tags=("fp4", "nvfp4", "bf16", "nemotron"))
def nemotron_3_ultra_bf16_with_nvfp4_mixed() -> MixedPrecisionConfig:
    """BF16 with NVFP4 matmuls; the last sixteen layers, 15 % of the model it is for, stay in BF16.

    Formats: E2M1 in every operand with E4M3 block scales; BF16 outside the linears; FP32 master weights and gradients.
    Scheme: nvfp4, weights stored in NVFP4; needs a model of more than sixteen layers.
    Hardware: compute capability 10.x (Blackwell); Transformer Engine 2.7; storing weights in FP4: megatron-core 0.17.1.
    Status: experimental; its authors named it after Nemotron 3 Ultra.
    Source: Megatron Bridge 0.6.2, recipe of the same name.
    """
    return bf16_with_nvfp4_mixed().override(
        first_last_layers_bf16=True,
        num_layers_at_start_in_bf16=0,
        num_layers_at_end_in_bf16=16,
    )
