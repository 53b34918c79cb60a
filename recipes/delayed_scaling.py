"""FP8 with per-tensor delayed scaling: scales come from the amax history of earlier steps."""

from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import register

from .unscaled import bf16_mixed, fp16_mixed

__all__ = ["bf16_with_fp8_delayed_scaling_mixed", "fp16_with_fp8_delayed_scaling_mixed"]


@register(tags=("fp8", "delayed", "bf16"), aliases=("fp8_delayed", "bf16_with_fp8_mixed"))
def bf16_with_fp8_delayed_scaling_mixed() -> MixedPrecisionConfig:
    """BF16 with FP8 matmuls under delayed scaling, and weights stored in FP8.

    Formats: hybrid (E4M3 forward, E5M2 gradients); BF16 outside the linears; FP32 master weights and gradients.
    Scheme: delayed, per tensor, largest amax of the last 1024 steps.
    Hardware: compute capability 8.9 (Ada) and 9.0 (Hopper) or later.
    Status: experimental; first and last layers cannot stay in BF16 under this scheme.
    Source: Megatron Bridge, recipe of the same name, snapshot 2026-08-22; NeMo 2.0 calls it bf16_with_fp8_mixed.
    """
    return _with_delayed_scaling(bf16_mixed())


@register(tags=("fp8", "delayed", "fp16"), aliases=("fp16_with_fp8_mixed",))
def fp16_with_fp8_delayed_scaling_mixed() -> MixedPrecisionConfig:
    """FP16 with FP8 matmuls under delayed scaling, and weights stored in FP8.

    Formats: hybrid (E4M3 forward, E5M2 gradients); FP16 outside the linears; FP32 master weights.
    Scheme: delayed, per tensor, largest amax of the last 1024 steps; a dynamic loss scale.
    Hardware: compute capability 8.9 (Ada) and 9.0 (Hopper) or later.
    Status: experimental; the BF16 recipe is in common use.
    Source: Megatron Bridge, recipe of the same name, snapshot 2026-08-22; NeMo 2.0 calls it fp16_with_fp8_mixed.
    """
    return _with_delayed_scaling(fp16_mixed())


def _with_delayed_scaling(base: MixedPrecisionConfig) -> MixedPrecisionConfig:
    return base.override(
        fp8="hybrid",
        fp8_recipe="delayed",
        fp8_margin=0,
        fp8_amax_history_len=1024,
        fp8_amax_compute_algo="max",
        fp8_param_gather=True,
    )
