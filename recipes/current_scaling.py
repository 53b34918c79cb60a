"""FP8 with per-tensor current scaling: scales come from the tensor that is about to be cast."""

from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import register

from .unscaled import bf16_mixed, fp16_mixed

__all__ = [
    "bf16_with_fp8_current_scaling_mixed",
    "fp16_with_fp8_current_scaling_mixed",
    "nemotron_h_bf16_with_fp8_current_scaling_mixed",
]


@register(tags=("fp8", "tensorwise", "bf16"), aliases=("fp8_current",))
def bf16_with_fp8_current_scaling_mixed() -> MixedPrecisionConfig:
    """BF16 with FP8 matmuls under current scaling; the first and the last layer stay in BF16.

    Formats: hybrid (E4M3 forward, E5M2 gradients); BF16 outside the linears; FP32 master weights and gradients.
    Scheme: tensorwise (current scaling), weights stored in FP8.
    Hardware: compute capability 8.9 (Ada) and 9.0 (Hopper) or later; Transformer Engine 2.2.
    Status: validated; Llama-3-8B was pretrained with it for 1T tokens (Megatron Bridge pull request 1178).
    Source: Megatron Bridge, recipe of the same name, snapshot 2026-08-22.
    """
    return _with_current_scaling(bf16_mixed(), layers_in_bf16=1)


@register(tags=("fp8", "tensorwise", "bf16", "nemotron"))
def nemotron_h_bf16_with_fp8_current_scaling_mixed() -> MixedPrecisionConfig:
    """BF16 with FP8 matmuls under current scaling; the first two and the last two layers stay in BF16.

    Formats: hybrid (E4M3 forward, E5M2 gradients); BF16 outside the linears; FP32 master weights and gradients.
    Scheme: tensorwise (current scaling), weights stored in FP8; in a hybrid model every block counts as a layer.
    Hardware: compute capability 8.9 (Ada) and 9.0 (Hopper) or later; Transformer Engine 2.2.
    Status: validated by its authors for Nemotron-H.
    Source: Megatron Bridge, recipe of the same name, snapshot 2026-08-22.
    """
    return _with_current_scaling(bf16_mixed(), layers_in_bf16=2)


@register(tags=("fp8", "tensorwise", "fp16"))
def fp16_with_fp8_current_scaling_mixed() -> MixedPrecisionConfig:
    """FP16 with FP8 matmuls under current scaling; the first and the last layer stay in FP16.

    Formats: hybrid (E4M3 forward, E5M2 gradients); FP16 outside the linears; FP32 master weights.
    Scheme: tensorwise (current scaling), weights stored in FP8; a dynamic loss scale.
    Hardware: compute capability 8.9 (Ada) and 9.0 (Hopper) or later; Transformer Engine 2.2.
    Status: experimental; the BF16 recipe is in common use.
    Source: Megatron Bridge, recipe of the same name, snapshot 2026-08-22.
    """
    return _with_current_scaling(fp16_mixed(), layers_in_bf16=1)


def _with_current_scaling(
    base: MixedPrecisionConfig, *, layers_in_bf16: int
) -> MixedPrecisionConfig:
    return base.override(
        fp8="hybrid",
        fp8_recipe="tensorwise",
        first_last_layers_bf16=True,
        num_layers_at_start_in_bf16=layers_in_bf16,
        num_layers_at_end_in_bf16=layers_in_bf16,
        fp8_param_gather=True,
    )
