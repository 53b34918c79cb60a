"""`round_to_grid`, `encode` and `decode`: the grid of a small format and its codes, in plain torch.

Between 2^E and 2^(E+1) a format with m mantissa bits has the step q = 2^(E-m). Below its smallest
normal value the step no longer falls. FP32 rounds to a step by itself when a large enough number is
added: from 2^k on, FP32 has the step 2^(k-23), so with k = E - m + 23

    rounded = (|x| + 2^k) - 2^k

is |x| rounded to nearest, ties to even, because 2^k is an even multiple of q. A compiler must not
simplify the addition away. So the C kernel is never compiled with -ffast-math. The steps:

1. Saturate: |x| = min(|x|, max). Values above the maximum, and infinity, become the maximum, as
   under `cvt.satfinite`.
2. Round the magnitude, and put the sign back. Rounding x itself would turn -0.0 and small negative
   values into +0.0.
3. NaN passes through every step. E2M1 has no NaN: there it becomes +6, as in the hardware's
   conversion.

Stochastic rounding takes floor(|x| / q + u) * q with u uniform in [0, 1), so that the expectation
is |x|. A value on the grid stays the same for every u.

Source: PTX ISA 8.8, `cvt` with .satfinite and the e4m3x2, e5m2x2 and e2m1x2 types; Transformer
Engine 2.20 common/util/ptx.cuh:526-600.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

from bridge.precision.formats import Format

RANDOM_BITS = 16
"""Bits of a random number of stochastic rounding.

If |x| / q is an integer, the FP32 sum |x| / q + u stays below the next integer with this number of
bits. So a value on the grid is not changed.
"""


def round_to_grid(
    x: torch.Tensor, element: Format, units: torch.Tensor | None = None
) -> torch.Tensor:
    """Return scaled FP32 values rounded to the nearest value of a format, in FP32, ties to even.

    Values beyond the format's maximum, and infinity, saturate. -0.0 keeps its sign. NaN stays NaN,
    and becomes +6 in E2M1.

    Args:
        x: FP32 values, already scaled.
        units: Uniform numbers in [0, 1) of the shape of `x`, for stochastic rounding. None:
            rounding to nearest.
    """
    magnitude = x.abs().clamp_(max=element.max)
    exponent = magnitude.view(torch.int32) & 0x7F800000
    exponent.clamp_(min=(127 + element.min_exponent) << 23)
    if units is None:
        exponent += (23 - element.mantissa_bits) << 23
        anchor = exponent.view(torch.float32)
        rounded = (magnitude + anchor).sub_(anchor)
    else:
        exponent -= element.mantissa_bits << 23
        step = exponent.view(torch.float32)
        rounded = torch.div(magnitude, step).add_(units).floor_().mul_(step)
    rounded = rounded.copysign_(x)
    # The anchor and step of a NaN are arbitrary, and a sum with a NaN is NaN whatever they are.
    if element.nan is None:
        rounded = torch.where(x.isnan(), torch.full_like(rounded, element.max), rounded)
    return rounded


def draw_random_units(
    first_row: int, shape: Sequence[int], seed: int, device: torch.device
) -> torch.Tensor:
    """Return FP32 numbers in [0, 1) for some rows of a matrix.

    A number depends only on the seed, its row and its column, so that chunks, threads and the C
    kernel draw the same numbers. A row has two keys of 32 bits, which are hashed with the column.

    Args:
        first_row: Number of the first of these rows in the matrix.
        shape: Rows and columns of the result.
        seed: 63 bits.
        device: Device of the result.
    """
    mask = 0xFFFFFFFF
    rows, columns = shape
    row = torch.arange(first_row, first_row + rows, device=device)[:, None]
    first_key = _mix_bits(row ^ (seed & mask))
    second_key = _mix_bits(first_key ^ (seed >> 32))
    mixed = torch.arange(columns, device=device) ^ first_key
    mixed ^= mixed >> 16
    mixed.mul_(0x7FEB352D).add_(second_key).bitwise_and_(mask)
    mixed ^= mixed >> 15
    mixed.mul_(0x846CA68B).bitwise_and_(mask)
    return (mixed >> (32 - RANDOM_BITS)).to(torch.float32).mul_(2.0**-RANDOM_BITS)


def _mix_bits(x: torch.Tensor) -> torch.Tensor:
    """Mix 32-bit integers in int64.

    Source: C. Wellons, "Prospecting for Hash Functions", lowbias32 (2018).
    """
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def encode(x: torch.Tensor, element: Format) -> torch.Tensor:
    """Return the codes (uint8, one byte per value) of FP32 values that are on the grid.

    The code of NaN is the format's canonical NaN.
    """
    magnitude = x.abs()
    bits = magnitude.view(torch.int32)
    rebias = (127 - element.bias) << element.mantissa_bits
    normal = (bits >> (23 - element.mantissa_bits)) - rebias
    step = 2.0 ** (element.min_exponent - element.mantissa_bits)
    subnormal = (magnitude * (1.0 / step)).to(torch.int32)
    codes = torch.where(magnitude < element.smallest_normal, subnormal, normal)
    codes |= x.signbit().to(torch.int32) << (element.bits - 1)
    if element.nan is not None:
        codes = torch.where(x.isnan(), torch.full_like(codes, element.nan), codes)
    return codes.to(torch.uint8)


@lru_cache
def list_code_values(element: Format) -> tuple[float, ...]:
    """Return the value of each code of a format, code 0 first."""
    sign_bit = 0
    if element.signed:
        sign_bit = 1 << (element.bits - 1)
    top = (1 << element.exponent_bits) - 1
    values = []
    for code in range(1 << element.bits):
        magnitude = code & ~sign_bit
        exponent, mantissa = divmod(magnitude, 1 << element.mantissa_bits)
        fraction = mantissa / (1 << element.mantissa_bits)
        if exponent > 0 or not element.signed:
            value = (1.0 + fraction) * 2.0 ** (exponent - element.bias)
        else:
            value = fraction * 2.0 ** (1 - element.bias)
        if magnitude == element.infinity:
            value = float("inf")
        elif (element.infinity is not None and exponent == top) or magnitude == element.nan:
            value = float("nan")
        if code & sign_bit:
            value = -value
        values.append(value)
    return tuple(values)


def decode(
    codes: torch.Tensor, element: Format, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the values of codes (uint8, one per value), exactly in BF16 or FP32."""
    table = torch.tensor(list_code_values(element), dtype=dtype, device=codes.device)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)
