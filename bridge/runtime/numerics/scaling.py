"""From the largest magnitude of a tile to its scale: Transformer Engine's formulas, in its order.

Per-tensor current scaling and blockwise scaling (`compute_scale`):

    amax      = max(amax, eps)
    scale     = format_max / amax    one true division; `scalar / tensor` in torch multiplies by a
                                     reciprocal and is one unit off for a quarter of all values
    scale     = 1          where amax is 0, infinite or NaN: nothing can be scaled
    scale     = largest    where the division overflowed (FP32's maximum, or blockwise that of the
                           *input's* type)
    scale     = its exponent alone, i.e. rounded down, with power-of-two scales; rounded up would
                saturate the maximum
    scale_inv = 1 / scale

MXFP8 (`compute_e8m0_exponent`): the scale that comes back is the smallest power of two >= amax /
format_max, rounded *up* so that nothing saturates, and stored as its biased exponent e. Zero
becomes the smallest scale 2^-127 and infinity the largest, 2^127. The factor that goes in is
2^(127 - e), exactly.

NVFP4 (`compute_nvfp4_tensor_scale`, `compute_nvfp4_block_scales`): an E4M3 scale cannot span a tensor's range, so one
FP32 factor first brings the tensor's amax to the largest product of both formats, 448 * 6:

    S_enc = 448 * 6 / amax_tensor                FP32's maximum at most; 1 for amax 0 or infinity
    S_dec = e4m3(amax_block * (S_enc * (1/6)))   stored; the parentheses are part of the definition
    enc   = 1 / (S_dec * (1 / S_enc))            from the *rounded* S_dec, so that its error cancels

Source: Transformer Engine 2.20 common/recipe/recipe_common.cuh:14-67,
common/cast/mxfp8/quantize_mxfp8.cuh:269-299, common/util/ptx.cuh:309-317,
common/cast/nvfp4/core_nvfp4.cuh:40-95.

An amax is never NaN (see `tiles.amax_of`). Most functions map FP32 tensors of any shape
elementwise. `compute_scalar_scale` and `compute_nvfp4_tensor_scale` are the same formulas for one number: a dozen
torch calls on one element would cost more than the rounding of a small tensor. They compute in FP64
and round to FP32, which for a division of two FP32 numbers is the correctly rounded FP32 quotient
(53 bits are more than 2 * 24 + 1).
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
    """Return the FP32 factors that take values up to `amax` to `maximum`.

    A factor is 1 where amax is 0, infinite or NaN. `amax` is FP32 and not negative, and counts as
    at least `eps`. `power_of_two` rounds a factor down to one, and `on_overflow` is the factor
    where maximum / amax is not finite.
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
    """Return the biased exponents (int32) of the MXFP8 scales.

    Zero and tiny tiles have 0, infinite tiles have 254.
    """
    bits = (amax * torch.tensor(1.0 / maximum, dtype=torch.float32)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # 2^-127 is a subnormal of FP32 with mantissa 0x400000: up to it the scale is 2^-127, code 0.
    above = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    return (exponent + above.to(torch.int32)).clamp_(max=254)


def decode_e8m0(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2^(e - 127) in FP32, exactly, for biased exponents 0 to 254 in int32."""
    bits = torch.where(exponent == 0, torch.full_like(exponent, 0x400000), exponent << 23)
    return bits.view(torch.float32)


def compute_scalar_scale(
    amax: float, maximum: float, *, power_of_two: bool, eps: float = 0.0
) -> float:
    """Return `compute_scale` of one amax, with FP32's maximum where the division overflows."""
    amax = max(amax, round_to_fp32(eps))
    if amax == 0 or math.isinf(amax):
        return 1.0
    scale = min(round_to_fp32(maximum / amax), FP32_MAX)
    if power_of_two:
        return 2.0 ** (math.frexp(scale)[1] - 1)
    return scale


def compute_nvfp4_tensor_scale(amax: float) -> float:
    """Return S_enc, the FP32 factor of a whole NVFP4 tensor; 1 where its amax is 0 or infinite."""
    if amax == 0 or math.isinf(amax):
        return 1.0
    return min(round_to_fp32(NVFP4_MAX / amax), FP32_MAX)


def round_to_fp32(x: float) -> float:
    """Return a number rounded to FP32; infinity where it overflows."""
    return ctypes.c_float(x).value


def compute_nvfp4_block_scales(
    amax: torch.Tensor, whole: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return S_dec, on E4M3's grid but in FP32, and the factor that goes into E2M1, for each tile.

    A tile of zeros has S_dec 0 and the factor FP32's maximum, which leaves its zeros zeros. So has
    a tile that is tiny relative to the tensor's largest value; its elements saturate at 6 and come
    back as 6 * 0.
    """
    tensor_scale = torch.full((1,), whole, dtype=torch.float32, device=amax.device)
    sixth = torch.tensor(1.0 / FORMATS["e2m1"].max, dtype=torch.float32)
    decode = (amax * (tensor_scale * sixth)).clamp_(max=FP32_MAX)
    decode = round_to_grid(decode, FORMATS["e4m3"])
    return decode, divide(1.0, decode * divide(1.0, tensor_scale)).clamp_(max=FP32_MAX)
