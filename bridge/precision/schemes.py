"""The low-precision scaling schemes as rows: what Megatron calls them, which formats and which settings they know."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FP4_SCHEMES", "FP8_SCHEMES", "SCHEMES", "Scheme"]


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One row: a value of `fp8_recipe` or `fp4_recipe`."""

    name: str
    """Megatron's name of the scheme."""
    family: str
    """fp8 or fp4: the field that holds its format."""
    title: str
    """What people call it."""
    formats: tuple[str, ...]
    """Legal values of `fp8` or `fp4`."""
    settings: tuple[str, ...] = ()
    """Fields of `MixedPrecisionConfig` that reach Transformer Engine under this scheme."""
    first_last_layers_bf16: bool = True
    """Megatron can keep the first and last layers in BF16 under this scheme."""
    source: str = ""
    """Where the row was read."""


SCHEMES = (
    Scheme(
        name="delayed",
        family="fp8",
        title="per-tensor delayed scaling",
        formats=("e4m3", "hybrid"),
        settings=(
            "fp8_margin",
            "fp8_amax_history_len",
            "fp8_amax_compute_algo",
            "fp8_dot_product_attention",
            "fp8_multi_head_attention",
        ),
        first_last_layers_bf16=False,
        source="megatron-core 0.16.1 fp8_utils.get_fp8_recipe, transformer_config.__post_init__",
    ),
    Scheme(
        name="tensorwise",
        family="fp8",
        title="per-tensor current scaling",
        formats=("e4m3", "hybrid"),
        settings=("fp8_dot_product_attention",),
        source="megatron-core 0.16.1 fp8_utils.get_fp8_recipe",
    ),
    Scheme(
        name="blockwise",
        family="fp8",
        title="subchannel scaling in 1x128 and 128x128 blocks",
        formats=("e4m3", "hybrid"),
        source="megatron-core 0.16.1 fp8_utils.get_fp8_recipe",
    ),
    Scheme(
        name="mxfp8",
        family="fp8",
        title="MXFP8, power-of-two scales per 32 values",
        formats=("e4m3",),
        settings=("fp8_dot_product_attention", "reuse_grad_buf_for_mxfp8_param_ag"),
        source="megatron-core 0.16.1 and 0.19.2 fp8_utils.get_fp8_recipe; E4M3 only: Megatron Bridge issue 638",
    ),
    Scheme(
        name="custom",
        family="fp8",
        title="a quantizer factory of the team's own",
        formats=("e4m3", "hybrid"),
        source="megatron-core 0.16.1 fp8_utils.get_fp8_recipe",
    ),
    Scheme(
        name="nvfp4",
        family="fp4",
        title="NVFP4, E4M3 scales per 16 values under one FP32 scale",
        formats=("e2m1",),
        settings=("fp8_dot_product_attention",),
        source="megatron-core 0.16.1 fp4_utils.get_fp4_recipe",
    ),
    Scheme(
        name="custom",
        family="fp4",
        title="a quantizer factory of the team's own",
        formats=("e2m1",),
        source="megatron-core 0.16.1 fp4_utils.get_fp4_recipe",
    ),
)

FP8_SCHEMES = {scheme.name: scheme for scheme in SCHEMES if scheme.family == "fp8"}
FP4_SCHEMES = {scheme.name: scheme for scheme in SCHEMES if scheme.family == "fp4"}
