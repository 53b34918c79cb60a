"""Functions from the largest magnitude of a tile to its scale, by Transformer Engine's formulas.

Per-tensor current scaling and blockwise scaling (`compute_scale`):

    amax      = max(amax, eps)
    scale     = format_max / amax    one true division; `scalar / tensor` in torch multiplies by a
                                     reciprocal and is one unit off for a quarter of all values
    scale     = 1          where amax is 0, infinite or NaN: nothing can be scaled
    scale     = largest    where the division overflowed (FP32's maximum, or blockwise that of the
                           *input's* type)
    scale     = its power of two    with power-of-two scales. It is rounded down: rounded up, it would
                                    saturate the maximum
    scale_inv = 1 / scale

`scale` multiplies values into the format, and `scale_inv` multiplies codes back.

MXFP8 (`compute_e8m0_exponent`): scale_inv is the smallest power of two >= amax / format_max. It is
rounded *up* so that nothing saturates, and stored as its biased exponent e. An amax of zero gives
the smallest scale_inv 2^-127, and infinity the largest, 2^127. scale is 2^(127 - e), exactly.

NVFP4 (`compute_nvfp4_tensor_scale`, `compute_nvfp4_block_scales`): the range of an E4M3 scale is
too small for the range of a tensor. So an FP32 scale first brings the tensor's amax to the largest
product of both formats, 448 * 6:

    S_enc = 448 * 6 / amax_tensor                FP32's maximum at most; 1 for amax 0 or infinity
    S_dec = e4m3(amax_block * (S_enc * (1/6)))   stored; the parentheses are part of the definition
    scale = 1 / (S_dec * (1 / S_enc))            from the *rounded* S_dec, so that its error cancels

Source: Transformer Engine 2.20 common/recipe/recipe_common.cuh:14-67,
common/cast/mxfp8/quantize_mxfp8.cuh:269-299, common/util/ptx.cuh:309-317,
common/cast/nvfp4/core_nvfp4.cuh:40-95.

An amax is never NaN (`tiles.compute_amax_over`). Most functions map tensors of any shape, element by
element. `compute_scalar_scale`, `compute_nvfp4_tensor_scale` and `decode_scalar_e8m0` are the same
formulas for one number, because a dozen torch calls on one element would cost more than the
rounding of a small tensor. They compute in FP64 and round to FP32. For a division of two FP32
numbers the result is the correctly rounded FP32 quotient, since FP64 has 53 bits and 2 * 24 + 1 are
enough.
"""

import ctypes
import math

import torch

from bridge.precision.formats import FORMATS
from bridge.runtime.numerics.grid import round_to_grid

FP32_MAX = FORMATS["fp32"].max
NVFP4_MAX = FORMATS["e2m1"].max * FORMATS["e4m3"].max
"""Largest code of NVFP4 times its largest block scale."""


def divide(numerator: float, denominator: torch.Tensor) -> torch.Tensor:
    """Return numerator / denominator, correctly rounded to FP32."""
    return torch.div(torch.full_like(denominator, numerator), denominator)


def compute_scale(
    amax: torch.Tensor,
    maximum: float,
    *,
    power_of_two: bool,
    eps: float = 0.0,
    on_overflow: float = FP32_MAX,
) -> torch.Tensor:
    """Return the FP32 scales that map values up to an amax to values up to a maximum.

    A scale is 1 where the amax is 0, infinite or NaN.

    Args:
        amax: FP32, not negative.
        maximum: Largest value of the format.
        power_of_two: Whether a scale is rounded down to a power of two.
        eps: A smaller amax counts as eps.
        on_overflow: The scale where maximum / amax is not finite.
    """
    amax = torch.where(amax < eps, torch.full_like(amax, eps), amax)
    scale = divide(maximum, amax)
    scale = torch.where(scale.isinf(), torch.full_like(scale, on_overflow), scale)
    if power_of_two:
        exponent = scale.view(torch.int32) & -0x800000  # drop the mantissa, i.e. & 0xFF800000
        scale = exponent.view(torch.float32)
    usable = (amax > 0) & amax.isfinite()
    return torch.where(usable, scale, torch.ones_like(scale))


def compute_e8m0_exponent(amax: torch.Tensor, maximum: float) -> torch.Tensor:
    """Return the biased exponents of MXFP8's scale_inv, int32.

    They are 0 for zero and tiny tiles, and 254 for infinite tiles.

    Args:
        amax: FP32, not negative.
        maximum: Largest value of the format.
    """
    bits = (amax * torch.tensor(1.0 / maximum, dtype=torch.float32)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # 2^-127 is a subnormal of FP32 with mantissa 0x400000: up to it the scale is 2^-127, code 0.
    is_above_power = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    return (exponent + is_above_power.to(torch.int32)).clamp_(max=254)


def decode_e8m0(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2^(e - 127) in FP32, exactly, for biased exponents 0 to 254 in int32."""
    bits = torch.where(exponent == 0, torch.full_like(exponent, 0x400000), exponent << 23)
    return bits.view(torch.float32)


def decode_scalar_e8m0(exponent: int) -> float:
    """Return `decode_e8m0` of one biased exponent."""
    return math.ldexp(1.0, exponent - 127)


def compute_scalar_scale(
    amax: float, maximum: float, *, power_of_two: bool, eps: float = 0.0
) -> float:
    """Return `compute_scale` of one amax. If the division overflows, it is FP32's maximum."""
    amax = max(amax, round_to_fp32(eps))
    if amax == 0 or math.isinf(amax):
        return 1.0
    scale = min(round_to_fp32(maximum / amax), FP32_MAX)
    if power_of_two:
        return 2.0 ** (math.frexp(scale)[1] - 1)
    return scale


def compute_nvfp4_tensor_scale(amax: float) -> float:
    """Return S_enc, the FP32 scale of a whole NVFP4 tensor, or 1 if its amax is 0 or infinite."""
    if amax == 0 or math.isinf(amax):
        return 1.0
    return min(round_to_fp32(NVFP4_MAX / amax), FP32_MAX)


def round_to_fp32(x: float) -> float:
    """Return a number rounded to FP32, or infinity beyond FP32's range."""
    return ctypes.c_float(x).value


def compute_nvfp4_block_scales(
    amax: torch.Tensor, tensor_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return S_dec and the scale of each tile, both in FP32. S_dec is on E4M3's grid.

    A tile of zeros has S_dec 0 and FP32's maximum as the scale, and its elements stay zero. A tile
    that is tiny relative to the tensor's largest value has the same S_dec and scale. Its elements
    saturate at 6, and are dequantised to 6 * 0.

    Args:
        amax: FP32, the largest magnitude of each tile.
        tensor_scale: S_enc.
    """
    s_enc = torch.full((1,), tensor_scale, dtype=torch.float32, device=amax.device)
    sixth = torch.tensor(1.0 / FORMATS["e2m1"].max, dtype=torch.float32)
    s_dec = (amax * (s_enc * sixth)).clamp_(max=FP32_MAX)
    s_dec = round_to_grid(s_dec, FORMATS["e4m3"])
    scale = divide(1.0, s_dec * divide(1.0, s_enc)).clamp_(max=FP32_MAX)
    return s_dec, scale
