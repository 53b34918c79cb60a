# ruff: noqa: N803, N806  (shape suffixes are capitals)
"""Slow, obvious quantisers, which the fast ones are compared with bit for bit.

Written in NumPy, tile by tile and with nothing shared with `grid.py`, `tiles.py` or the C kernel but the rows of the
format table. Rounding looks a value up in the list of all values of the format. Scales are FP32 scalars.

Shapes: M rows, K columns, B and C numbers of tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bridge.precision.formats import FORMATS, Format
from bridge.precision.schemes import WHOLE_TENSOR, Tile

if TYPE_CHECKING:
    from bridge.runtime.numerics.spec import QuantSpec

F32 = np.float32
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

LARGEST = {"float32": F32(FORMATS["fp32"].max), "bfloat16": F32(FORMATS["bf16"].max), "float16": F32(65504)}
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], dtype=F32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReferenceCopy:
    """One copy of a tensor, in the tensor's own axes; nothing packed, padded or transposed."""

    codes: Bytes
    """(M, K), one code per value."""
    scale_inv: npt.NDArray[np.generic]
    """(B, C): FP32, or for MXFP8 the exponent and for NVFP4 the E4M3 code in uint8; (1,) for a whole tensor."""
    values: Floats
    """(M, K): code * scale_inv; of NVFP4 without the tensor's factor."""
    amax: Floats
    """(1,)"""


@lru_cache
def value_table(element: Format) -> tuple[float, ...]:
    """Return the magnitudes of a format by code, the positive half, NaN and infinity left out."""
    values = []
    for code in range(1 << (element.bits - 1)):
        exponent, mantissa = code >> element.mantissa_bits, code & ((1 << element.mantissa_bits) - 1)
        fraction = mantissa / 2**element.mantissa_bits
        if exponent == 0:
            values.append(fraction * 2.0 ** (1 - element.bias))
        else:
            values.append((1 + fraction) * 2.0 ** (exponent - element.bias))
        if values[-1] == element.max:
            break
    return tuple(values)


def round_codes(scaled: Floats, element: Format) -> Bytes:
    """Return the codes of FP32 values: nearest, ties to the even code, saturating, with the sign of zero kept."""
    table = np.array(value_table(element), dtype=np.float64)
    middle = (table[:-1] + table[1:]) / 2
    with np.errstate(invalid="ignore"):  # signalling NaN
        magnitude = np.minimum(np.abs(scaled.astype(np.float64)), element.max)
    below = np.searchsorted(middle, magnitude, side="left")  # a value on a middle counts as below it ...
    tie = below < len(middle)
    tie[tie] = middle[below[tie]] == magnitude[tie]
    codes = below + (tie & (below % 2 == 1))  # ... unless the code above is the even one
    codes = codes | (np.signbit(scaled).astype(np.int64) << (element.bits - 1))
    nan = element.nan
    if nan is None:  # the largest value stands for NaN
        nan = len(table) - 1
    return np.where(np.isnan(scaled), nan, codes).astype(np.uint8)


def code_floats(codes: Bytes, element: Format) -> Floats:
    """Return the values of codes."""
    table = np.array(value_table(element), dtype=F32)
    sign, magnitude = codes >> (element.bits - 1), codes & ((1 << (element.bits - 1)) - 1)
    values = np.where(magnitude < len(table), table[np.minimum(magnitude, len(table) - 1)], F32(np.nan))
    return np.where(sign == 1, -values, values).astype(F32)


def amax_of(x: Floats) -> np.float32:
    """Return the largest magnitude, NaN left out; 0 of nothing."""
    magnitudes = np.abs(x[~np.isnan(x)])
    if magnitudes.size == 0:
        return F32(0)
    return F32(magnitudes.max())


def plain_scale(amax: np.float32, maximum: float, power_of_two: bool, eps: float, largest: np.float32) -> np.float32:
    """Return the factor of current and blockwise scaling."""
    amax = max(amax, F32(eps))
    if amax == 0 or np.isinf(amax):
        return F32(1)
    with np.errstate(over="ignore"):
        scale = F32(maximum) / amax
    if np.isinf(scale):
        scale = largest
    if power_of_two:
        scale = F32(2.0 ** (math.frexp(float(scale))[1] - 1))
    return scale


def e8m0(amax: np.float32, maximum: float) -> int:
    """Return the biased exponent of the smallest power of two that is at least amax / maximum."""
    target = float(amax * F32(1 / maximum))
    if target == 0:
        return 0
    if math.isinf(target):
        return 254
    mantissa, exponent = math.frexp(target)
    return min(max(exponent - (mantissa == 0.5) + 127, 0), 254)


def nvfp4_scales(amax: np.float32, tensor_amax: np.float32) -> tuple[int, np.float32, np.float32]:
    """Return the E4M3 code of a tile's scale, its value, and the factor that goes in."""
    most = F32(FORMATS["fp32"].max)
    with np.errstate(all="ignore"):
        whole = min(F32(448 * 6) / tensor_amax, most)
        if tensor_amax == 0 or whole == 0:
            whole = F32(1)
        target = min(amax * (whole * F32(1 / 6)), most)
        code = round_codes(np.array([target], dtype=F32), FORMATS["e4m3"])
        decode = code_floats(code, FORMATS["e4m3"])[0]
        encode = min(F32(1) / (decode * (F32(1) / whole)), most)
    return int(code[0]), decode, encode


def quantise_copy(
    x_MK: Floats, spec: QuantSpec, *, columnwise: bool, dtype: str, scale: float | None = None
) -> ReferenceCopy:
    """Quantise one copy of a matrix.

    Args:
        x_MK: the values, widened to FP32.
        spec: what to do; stochastic rounding is not for a reference, and ignored.
        columnwise: which copy.
        dtype: the type the values had (float32, bfloat16, float16).
        scale: the stored factor of delayed scaling.
    """
    if columnwise and spec.hadamard:
        x_MK = hadamard(x_MK)
    amax = amax_of(x_MK)
    tile = spec.tile(columnwise)
    if tile == WHOLE_TENSOR:
        factor = whole_scale(amax, spec)
        if scale is not None:
            factor = F32(scale)
        with np.errstate(all="ignore"):
            codes, inverse = round_codes(x_MK * factor, spec.element), F32(1) / factor
            values = code_floats(codes, spec.element) * inverse
        return ReferenceCopy(codes=codes, scale_inv=np.array([inverse]), values=values, amax=np.array([amax]))
    return _tiled_copy(x_MK, spec, tile, dtype, amax)


def whole_scale(amax: np.float32, spec: QuantSpec) -> np.float32:
    """Return the factor of a whole tensor under current scaling."""
    return plain_scale(amax, spec.element.max, spec.power_of_two_scale, spec.eps, LARGEST["float32"])


def _tiled_copy(x_MK: Floats, spec: QuantSpec, tile: Tile, dtype: str, amax: np.float32) -> ReferenceCopy:
    rows, columns = x_MK.shape
    counts = -(-rows // tile[0]), -(-columns // tile[1])
    codes, values = np.zeros(x_MK.shape, np.uint8), np.zeros(x_MK.shape, F32)
    stored = np.zeros(counts, np.uint8)
    if spec.scheme == "blockwise":
        stored = np.zeros(counts, F32)
    for b in range(counts[0]):
        for c in range(counts[1]):
            where = np.s_[b * tile[0] : (b + 1) * tile[0], c * tile[1] : (c + 1) * tile[1]]
            most = amax_of(x_MK[where])
            if spec.scheme == "mxfp8":
                stored[b, c] = exponent = e8m0(most, spec.element.max)
                factor, inverse = F32(2.0 ** (127 - exponent)), F32(2.0 ** (exponent - 127))
            elif spec.scheme == "nvfp4":
                stored[b, c], inverse, factor = nvfp4_scales(most, amax)
            else:
                factor = plain_scale(most, spec.element.max, spec.power_of_two_scale, spec.eps, LARGEST[dtype])
                stored[b, c] = inverse = F32(1) / factor
            with np.errstate(all="ignore"):
                codes[where] = round_codes(x_MK[where] * factor, spec.element)
                values[where] = code_floats(codes[where], spec.element) * inverse
    return ReferenceCopy(codes=codes, scale_inv=stored, values=values, amax=np.array([amax]))


def hadamard(x_MK: Floats) -> Floats:
    """Return the random Hadamard transform of each 16 rows, rounded to BF16, in the order of `hadamard.py`."""
    rows, columns = x_MK.shape
    padded = np.zeros((-(-rows // 16) * 16, columns), F32)
    padded[:rows] = x_MK
    with np.errstate(all="ignore"):
        for start in range(0, len(padded), 16):
            group = padded[start : start + 16] * SIGNS[:, None]
            for distance in (1, 2, 4, 8):
                for low in range(16):
                    if not low & distance:
                        a, b = group[low].copy(), group[low + distance].copy()
                        group[low], group[low + distance] = a + b, a - b
            padded[start : start + 16] = to_bf16(group * F32(0.25))
    return padded


def to_bf16(x: Floats) -> Floats:
    """Return values rounded to the nearest BF16, ties to even, still in FP32."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(F32)
    return np.where(np.isnan(x), F32(np.nan), rounded).astype(F32)


def delayed_update(
    history: list[float], scale: float, *, maximum: float, margin: int, algo: str
) -> tuple[list[float], float]:
    """Return history and scale of one operand after an update; `history[0]` is the amax of this step."""
    last = history[0]
    if last == 0:
        return list(history), scale
    rolled = [0.0]
    if len(history) > 1:
        rolled = [0.0, *history[2:], last]
    amax = last
    if algo != "most_recent":
        amax = max(value for value in [last, *history[1:]] if not math.isnan(value))
    if 0 < amax < math.inf:
        with np.errstate(over="ignore"):
            scale = float(min(F32(maximum * 2.0**-margin) / F32(amax), F32(FORMATS["fp32"].max)))
    return rolled, scale
