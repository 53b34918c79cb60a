"""FP8 with subchannel scaling: one scale per 1x128 values of an activation and per 128x128 of a weight."""

import functools
import warnings

from bridge.errors import BridgeWarning
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import register

from .unscaled import bf16_mixed, fp16_mixed

__all__ = [
    "bf16_with_fp8_subchannel_scaling_mixed",
    "fp16_with_fp8_subchannel_scaling_mixed",
    "nanov2_bf16_with_fp8_current_scaling_mixed",
    "nanov2_bf16_with_fp8_subchannel_scaling_mixed",
]


@register(tags=("fp8", "blockwise", "bf16"), aliases=("blockwise", "fp8_sc"))
def bf16_with_fp8_subchannel_scaling_mixed() -> MixedPrecisionConfig:
    """BF16 with FP8 matmuls under blockwise (subchannel) scaling.

    Formats: hybrid (E4M3 forward, E5M2 gradients); BF16 outside the linears; FP32 master weights and gradients.
    Scheme: blockwise, 1x128 and 128x128 blocks with power-of-two scales; weights stored in BF16.
    Hardware: compute capability 9.0 (Hopper) with CUDA 12.9; Blackwell emulates it with MXFP8.
    Status: experimental; reports differ on whether hybrid or e4m3 tracks BF16 better here.
    Source: Megatron Bridge, recipe of the same name, snapshot 2026-08-22.
    """
    return bf16_mixed().override(fp8="hybrid", fp8_recipe="blockwise", fp8_param_gather=False)


@register(tags=("fp8", "blockwise", "fp16"))
def fp16_with_fp8_subchannel_scaling_mixed() -> MixedPrecisionConfig:
    """FP16 with FP8 matmuls under blockwise (subchannel) scaling.

    Formats: hybrid (E4M3 forward, E5M2 gradients); FP16 outside the linears; FP32 master weights.
    Scheme: blockwise, 1x128 and 128x128 blocks with power-of-two scales; weights stored in FP16; a dynamic loss scale.
    Hardware: compute capability 9.0 (Hopper) with CUDA 12.9; Blackwell emulates it with MXFP8.
    Status: experimental; the BF16 recipe is in common use.
    Source: Megatron Bridge, recipe of the same name, snapshot 2026-08-22.
    """
    return fp16_mixed().override(fp8="hybrid", fp8_recipe="blockwise", fp8_param_gather=False)


@register(tags=("fp8", "blockwise", "bf16", "nemotron"))
def nanov2_bf16_with_fp8_subchannel_scaling_mixed() -> MixedPrecisionConfig:
    """BF16 with FP8 matmuls under blockwise scaling; the first two and the last two layers stay in BF16.

    Formats: hybrid (E4M3 forward, E5M2 gradients); BF16 outside the linears; FP32 master weights and gradients.
    Scheme: blockwise, weights stored in FP8.
    Hardware: compute capability 9.0 (Hopper) with CUDA 12.9; Blackwell emulates it with MXFP8.
    Status: validated by its authors for Nemotron Nano v2.
    Source: Megatron Bridge, where it is called nanov2_bf16_with_fp8_current_scaling_mixed, snapshot 2026-08-22.
    """
    return bf16_mixed().override(
        fp8="hybrid",
        fp8_recipe="blockwise",
        first_last_layers_bf16=True,
        num_layers_at_start_in_bf16=2,
        num_layers_at_end_in_bf16=2,
        fp8_param_gather=True,
    )


@register(tags=("fp8", "blockwise", "bf16", "nemotron", "misnamed"))
def nanov2_bf16_with_fp8_current_scaling_mixed() -> MixedPrecisionConfig:
    """Blockwise scaling, unlike its name: Megatron Bridge's name of nanov2_bf16_with_fp8_subchannel_scaling_mixed.

    Formats: hybrid (E4M3 forward, E5M2 gradients); BF16 outside the linears; FP32 master weights and gradients.
    Scheme: blockwise, weights stored in FP8.
    Hardware: compute capability 9.0 (Hopper) with CUDA 12.9; Blackwell emulates it with MXFP8.
    Status: kept so that code written for Megatron Bridge runs; warns once.
    Source: Megatron Bridge, recipe of the same name, snapshot 2026-08-22, whose values are blockwise.
    """
    _warn_of_the_name()
    return nanov2_bf16_with_fp8_subchannel_scaling_mixed()


@functools.cache
def _warn_of_the_name() -> None:
    warnings.warn(
        "nanov2_bf16_with_fp8_current_scaling_mixed: the name says current scaling, the values are blockwise. "
        "Use nanov2_bf16_with_fp8_subchannel_scaling_mixed for the same recipe, or "
        "nemotron_h_bf16_with_fp8_current_scaling_mixed for current scaling.",
        BridgeWarning,
        stacklevel=3,
    )
