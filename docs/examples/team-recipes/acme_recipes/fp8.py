"""FP8 recipes for Hopper."""

from bridge import MixedPrecisionConfig, get_mixed_precision_config, register


@register(tags=("fp8", "acme"))
def acme_fp8() -> MixedPrecisionConfig:
    """FP8 current scaling with two layers in BF16 at either end."""
    return get_mixed_precision_config("bf16_with_fp8_current_scaling_mixed").override(
        num_layers_at_start_in_bf16=2,
        num_layers_at_end_in_bf16=2,
    )


@register(tags=("fp8", "acme"))
def acme_fp8_long() -> MixedPrecisionConfig:
    """`acme_fp8` for long runs: weights are stored and gathered in BF16."""
    return get_mixed_precision_config("acme_fp8").override(fp8_param_gather=False)
