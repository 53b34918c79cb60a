# ruff: noqa: N803  (shape suffixes are capitals)
"""`make_operand`: a quantised tensor as an operand of an emulated GEMM, BF16 values and a factor.

    dequantised tensor = factor * values

Every value of a low-precision tensor is a BF16 number, or a BF16 number times a factor of the whole
tensor. So the GEMM multiplies the BF16 numbers, which is exact, and applies the factors of both
operands to the FP32 sums (`gemm.py`):

| scheme              | value               | significant bits | factor                           |
|---------------------|---------------------|------------------|----------------------------------|
| tensorwise, delayed | code                | at most 4        | scale_inv, any FP32 number       |
| blockwise, mxfp8    | code * 2^e          | at most 4        | 1 (or a power of two, see below) |
| nvfp4               | code * S_dec (E4M3) | at most 2 + 4    | amax / (6 * 448)                 |

BF16 ends at 2^128 and has fewer bits below 2^-126. Block scales reach from 2^-127 to 2^127. Their
products with codes would leave BF16 at both ends. The values of a tensor with such scales are
multiplied by a power of two (`choose_range_multiplier`), and the factor is its inverse. A tensor
with values at *both* ends, more than 2^200 apart, keeps its large values and loses its tiny values.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from bridge.precision.formats import Format
from bridge.runtime.numerics import dispatch
from bridge.runtime.numerics.quantise import choose_tensor_scale, draw_seed
from bridge.runtime.numerics.quantised import Quantised
from bridge.runtime.numerics.scaling import NVFP4_MAX, decode_scalar_e8m0, round_to_fp32
from bridge.runtime.numerics.spec import QuantSpec
from bridge.runtime.numerics.tiles import ScaleRange, TilePass


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GemmOperand:
    """The row-wise or column-wise copy of a tensor, ready to be multiplied."""

    role: str
    """input, weight or grad_output."""
    spec: QuantSpec
    columnwise: bool
    values: torch.Tensor
    """(M, K) BF16, in the axes of the tensor, not transposed."""
    factor: float
    """The FP32 number that multiplies the values to give the dequantised tensor."""
    nvfp4_amax: float | None = None
    """The amax from which the factor is computed. A GEMM multiplies the amaxes of both operands.

    None: another scheme than NVFP4.
    """
    amax: float | None
    """Largest magnitude before quantisation. None: the operand was decoded from stored codes."""
    tensor_scale: float | None = None
    """Scale of the whole tensor. None: the scheme has scales per tile, or codes were stored."""

    @property
    def has_stored_codes(self) -> bool:
        """Whether the operand was decoded from codes that existed already."""
        return self.amax is None

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantised tensor, (M, K), computed in FP32 and rounded once."""
        return (self.values.float() * self.factor).to(dtype)


def make_operand(
    x_MK: torch.Tensor,
    spec: QuantSpec,
    role: str,
    *,
    columnwise: bool = False,
    tensor_scale: float | None = None,
    generator: torch.Generator | None = None,
) -> GemmOperand:
    """Round a matrix to the grid of its scheme, as an operand of a GEMM.

    The dequantised operand is the tensor that `quantise(...).dequantise()` returns, up to the
    rounding of its dtype.

    Args:
        x_MK: FP32, BF16 or FP16.
        spec: Format, scale rule and tiles.
        role: input, weight or grad_output.
        columnwise: Whether the column-wise copy is made. After a Hadamard transform its rows are
            padded to a multiple of 16.
        tensor_scale: Scale of the whole tensor, such as the stored scale of delayed scaling. None:
            the scale is computed.
        generator: The generator of the seed of stochastic rounding. None: torch's default
            generator.
    """
    tensor_scale, amax = choose_tensor_scale(
        x_MK, spec, tensor_scale, hadamard=spec.is_transformed(columnwise)
    )
    seed = None
    if spec.stochastic:
        seed = draw_seed(generator)
    tile_pass = TilePass(
        spec=spec,
        columnwise=columnwise,
        tensor_scale=tensor_scale,
        seed=seed,
        measures_amax=amax is None,
    )
    result = dispatch.run_tile_pass(x_MK, tile_pass)
    if amax is None:
        amax = result.amax
    operand_scale, scale_inv = None, 1.0
    if spec.has_single_scale:
        operand_scale, scale_inv = tensor_scale, round_to_fp32(1.0 / tensor_scale)
    factors = _choose_factors(spec, scale_inv, amax, result.scale_range)
    values = result.values
    if factors.range_multiplier != 1.0:
        # The scales are known only after a pass, so the multiplier needs a second pass. This is
        # rare.
        second_pass = replace(tile_pass, range_multiplier=factors.range_multiplier)
        values = dispatch.run_tile_pass(x_MK, second_pass).values
    return GemmOperand(
        role=role,
        spec=spec,
        columnwise=columnwise,
        values=values,
        factor=factors.factor,
        nvfp4_amax=factors.nvfp4_amax,
        amax=amax,
        tensor_scale=operand_scale,
    )


def make_stored_operand(stored: Quantised, role: str, *, columnwise: bool = False) -> GemmOperand:
    """Return the operand of codes and scales that exist already, for example of a stored weight.

    Args:
        stored: The codes and scales.
        role: input, weight or grad_output.
        columnwise: Whether the column-wise copy is returned.

    Raises:
        PrecisionTypeError: The copy was not made.
    """
    spec = stored.spec
    reads_columnwise = columnwise
    if spec.copies_share_values:  # the copy that exists is read
        reads_columnwise = stored.codes is None
    _, scales = stored.get_copy(reads_columnwise)
    scale_inv = 1.0
    if spec.has_single_scale:
        scale_inv = scales.item()
    amax = stored.get_copy_amax(reads_columnwise).item()
    scale_range = _measure_scale_range(spec, scales)
    factors = _choose_factors(spec, scale_inv, amax, scale_range)
    values = dispatch.decode_stored(
        stored, columnwise=reads_columnwise, range_multiplier=factors.range_multiplier
    )
    return GemmOperand(
        role=role,
        spec=spec,
        columnwise=columnwise,
        values=values,
        factor=factors.factor,
        nvfp4_amax=factors.nvfp4_amax,
        amax=None,
    )


def _measure_scale_range(spec: QuantSpec, scales: torch.Tensor) -> ScaleRange | None:
    """Return the smallest and the largest of the stored scales of tiles.

    The result is None without tiles, and for a scheme whose values cannot leave BF16's range.

    Tiles of zeros count here, because stored scales do not show them. They do not count for
    `TileResult.scale_range`. The scale of such a tile is 2^-127 under MXFP8. It only leads to a
    multiplier that is not needed. Multiplier and factor are powers of two, so they change no
    result.
    """
    if spec.scale_rule not in ("fp32", "e8m0") or not scales.numel():
        return None
    edges = scales.aminmax()
    smallest, largest = edges.min.item(), edges.max.item()
    if spec.scale_rule == "fp32":
        return ScaleRange(smallest, largest)
    return ScaleRange(decode_scalar_e8m0(int(smallest)), decode_scalar_e8m0(int(largest)))


class _Factors(NamedTuple):
    """The numbers of the whole tensor that an operand needs."""

    factor: float
    nvfp4_amax: float | None = None
    range_multiplier: float = 1.0
    """Power of two that multiplies the values. The factor divides by it again."""


def _choose_factors(
    spec: QuantSpec, scale_inv: float, amax: float, scale_range: ScaleRange | None
) -> _Factors:
    """Return the factors of an operand by the table in this file's docstring.

    Args:
        spec: Format, scale rule and tiles.
        scale_inv: Dequantisation scale of the whole tensor, for a scheme with a single scale.
        amax: Largest magnitude of the tensor, for NVFP4.
        scale_range: Range of the dequantisation scales of the tiles, for the other schemes.
    """
    if spec.has_single_scale:
        return _Factors(factor=scale_inv)
    if spec.has_second_level:
        return _Factors(factor=round_to_fp32(amax / NVFP4_MAX), nvfp4_amax=amax)
    if scale_range is None:
        return _Factors(factor=1.0)
    multiplier = choose_range_multiplier(scale_range, spec.element)
    return _Factors(factor=1.0 / multiplier, range_multiplier=multiplier)


def choose_range_multiplier(scale_range: ScaleRange, element: Format) -> float:
    """Return the power of two that keeps code * scale_inv exact in BF16.

    It is 1.0 unless a scale is in one of the outermost binades of BF16.

    Args:
        scale_range: Smallest and largest scale_inv of the tensor's tiles.
    """
    smallest_log2 = _floor_log2(scale_range.smallest)
    largest_log2 = _floor_log2(scale_range.largest)
    # The largest code stays below 2^128, and the smallest subnormal code is at least 2^-126.
    highest_exact_log2 = 127 - _floor_log2(element.max)
    lowest_exact_log2 = -126 - (element.min_exponent - element.mantissa_bits)
    if largest_log2 > highest_exact_log2:
        return 2.0 ** (highest_exact_log2 - largest_log2)
    if smallest_log2 < lowest_exact_log2:
        # If the values at one end must lose bits, the large values keep them.
        needed_log2 = lowest_exact_log2 - smallest_log2
        return 2.0 ** min(needed_log2, highest_exact_log2 - largest_log2)
    return 1.0


def _floor_log2(x: float) -> int:
    """Return floor(log2(x)) of a positive number."""
    return math.frexp(x)[1] - 1
