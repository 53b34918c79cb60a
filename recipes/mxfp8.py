"""MXFP8: one power-of-two scale (E8M0) per 32 values, E4M3 in every operand."""

from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import register

from .unscaled import bf16_mixed, fp16_mixed

__all__ = ["bf16_with_mxfp8_mixed", "fp16_with_mxfp8_mixed"]


@register(tags=("fp8", "mxfp8", "bf16"), aliases=("mxfp8", "fp8_mx"))
def bf16_with_mxfp8_mixed() -> MixedPrecisionConfig:
    """BF16 with MXFP8 matmuls and weights stored in MXFP8.

    Formats: E4M3 in every operand with E8M0 scales; BF16 outside the linears; FP32 master weights and gradients.
    Scheme: mxfp8, blocks of 32; updated weights are gathered through the gradient buffer.
    Hardware: compute capability 10.x (Blackwell); Transformer Engine refuses 12.x; Transformer Engine 2.1.
    Status: validated; Llama-3-8B was pretrained with it for 1T tokens (Megatron Bridge pull request 1178).
    Source: Megatron Bridge, recipe of the same name, snapshot 2026-08-22; NeMo 2.0's hybrid gradients diverged.
    """
    return _with_mxfp8(bf16_mixed())


@register(tags=("fp8", "mxfp8", "fp16"))
def fp16_with_mxfp8_mixed() -> MixedPrecisionConfig:
    """FP16 with MXFP8 matmuls and weights stored in MXFP8.

    Formats: E4M3 in every operand with E8M0 scales; FP16 outside the linears; FP32 master weights.
    Scheme: mxfp8, blocks of 32; updated weights are gathered through the gradient buffer; a dynamic loss scale.
    Hardware: compute capability 10.x (Blackwell); Transformer Engine refuses 12.x; Transformer Engine 2.1.
    Status: experimental; the BF16 recipe is in common use.
    Source: Megatron Bridge, recipe of the same name, snapshot 2026-08-22.
    """
    return _with_mxfp8(fp16_mixed())


def _with_mxfp8(base: MixedPrecisionConfig) -> MixedPrecisionConfig:
    return base.override(
        fp8="e4m3",
        fp8_recipe="mxfp8",
        fp8_param_gather=True,
        reuse_grad_buf_for_mxfp8_param_ag=True,
    )
