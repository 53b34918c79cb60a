"""Recipes without a low-precision scheme: FP32, BF16, FP16, and FP32 weights under BF16 autocast."""

from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import register

__all__ = ["bf16_autocast_mixed", "bf16_mixed", "fp16_mixed", "fp32"]


@register(tags=("fp32",))
def fp32() -> MixedPrecisionConfig:
    """Train in FP32 throughout.

    Formats: FP32 weights, activations, gradients and optimizer state.
    Scheme: none. `tf32` keeps the setting of the process; state it to be sure.
    Hardware: any.
    Status: validated; the reference for every other recipe.
    Source: Megatron Core with fp16 and bf16 off. Megatron Bridge has no such recipe.
    """
    return MixedPrecisionConfig(fp32=True, autocast_enabled=False)


@register(tags=("bf16",), aliases=("bf16",))
def bf16_mixed() -> MixedPrecisionConfig:
    """Train in BF16 with FP32 master weights and FP32 gradient reduction.

    Formats: BF16 weights and activations, FP32 master weights, gradients and optimizer state.
    Scheme: none, and no loss scale: BF16 has the range of FP32.
    Hardware: native from compute capability 8.0; any CPU.
    Status: validated; the default for large models.
    Source: Megatron Bridge, recipe of the same name, snapshot 2026-08-22.
    """
    return MixedPrecisionConfig(
        bf16=True, params_dtype="bf16", pipeline_dtype="bf16", grad_reduce_in_fp32=True
    )


@register(tags=("fp16",))
def fp16_mixed() -> MixedPrecisionConfig:
    """Train in FP16 with FP32 master weights and a dynamic loss scale.

    Formats: FP16 weights, activations and gradient reduction, FP32 master weights and optimizer state.
    Scheme: none; the loss scale begins at 2**32, halves on overflow and doubles after 1000 good steps.
    Hardware: any GPU; the choice for compute capability 7.0 and 7.5, which have no BF16.
    Status: validated.
    Source: Megatron Bridge, recipe of the same name, snapshot 2026-08-22.
    """
    return MixedPrecisionConfig(
        fp16=True, params_dtype="fp16", pipeline_dtype="fp16", grad_reduce_in_fp32=False
    )


@register(tags=("bf16", "autocast"))
def bf16_autocast_mixed() -> MixedPrecisionConfig:
    """Keep FP32 weights and let autocast run each operator in BF16 or FP32.

    Formats: FP32 weights, gradients and optimizer state; BF16 matmuls and activations where autocast chooses so.
    Scheme: none. There is no master copy: the weights themselves are FP32.
    Hardware: native from compute capability 8.0; any CPU.
    Status: validated for small models; slower and larger than bf16_mixed.
    Source: torch.autocast through Megatron Core's `enable_autocast`; what other trainers call "bf16" or AMP O1.
    """
    return MixedPrecisionConfig(fp32=True, autocast_enabled=True, autocast_dtype="bf16")
