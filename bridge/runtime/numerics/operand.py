# ruff: noqa: N803  (shape suffixes are capitals)
"""Operands of an emulated GEMM: a quantised tensor as BF16 numbers, and a factor for the result.

Everything a low-precision tensor can hold is a BF16 number, so multiplying in BF16 is exact:

| scheme              | operand value       | significant bits | factor on the result              |
|---------------------|---------------------|------------------|-----------------------------------|
| tensorwise, delayed | code                | at most 4        | scale_inv, any FP32 number        |
| blockwise, mxfp8    | code * 2^e          | at most 4        | 1 (or a power of two, see below)  |
| nvfp4               | code * S_dec (E4M3) | at most 2 + 4    | amax, and 1 / (6 * 448)^2 of both |

BF16 ends at 2^128 and has fewer bits below 2^-126. Block scales reach from 2^-127 to 2^127 and
would leave it at both ends, so a tensor with scales out there is multiplied by a power of two
(`choose_shift`) that is divided out of the result. A tensor that lives at *both* ends, more than
2^200 apart, keeps its large values and drops the tiny ones.
"""

import math
from dataclasses import dataclass, replace

import torch

from bridge.precision.formats import Format
from bridge.runtime.numerics import dispatch
from bridge.runtime.numerics.quantise import compute_tensor_scale, draw_seed
from bridge.runtime.numerics.quantised import Quantised
from bridge.runtime.numerics.scaling import round_to_fp32
from bridge.runtime.numerics.spec import QuantSpec
from bridge.runtime.numerics.tiles import TilePass


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
    """Factor of the result of a GEMM, an FP32 number.

    Under NVFP4 it lacks 1 / (6 * 448), which `gemm.operand_factor` has.
    """
    amax: float | None
    """Largest magnitude before quantisation; None for stored codes."""
    scale: float | None = None
    """Scale of the whole tensor; None for a scheme with a scale per tile, and for stored codes."""


def make_operand(
    x_MK: torch.Tensor,
    spec: QuantSpec,
    role: str,
    *,
    columnwise: bool = False,
    scale: float | None = None,
    generator: torch.Generator | None = None,
) -> GemmOperand:
    """Round a matrix to the grid of its scheme, as an operand of a GEMM.

    The product of the operand's values and its `gemm.operand_factor` is the tensor that
    `quantise(...).dequantise()` returns, up to the rounding of its dtype.

    Args:
        x_MK: FP32, BF16 or FP16.
        spec: Format, scale rule and tiles.
        role: input, weight or grad_output.
        columnwise: Which copy is made. After a Hadamard transform its rows are padded to a multiple
            of 16.
        scale: Stored scale of delayed scaling. None computes the scale.
        generator: Stochastic rounding draws its seed from it; None is torch's default generator.
    """
    measured_amax = None
    if scale is None and spec.needs_amax:
        measured_amax = dispatch.compute_amax(x_MK, hadamard=columnwise and spec.hadamard)
        scale = compute_tensor_scale(measured_amax, spec)
    tile_pass = TilePass(spec=spec, columnwise=columnwise, measure=measured_amax is None)
    if scale is not None:
        tile_pass = replace(tile_pass, scale=scale)
    if spec.stochastic:
        tile_pass = replace(tile_pass, seed=draw_seed(generator))
    result = dispatch.run_tile_pass(x_MK, tile_pass)
    amax = measured_amax
    if amax is None:
        amax = result.amax
    operand = GemmOperand(
        role=role,
        spec=spec,
        columnwise=columnwise,
        values=result.values,
        factor=1.0,
        amax=amax,
    )
    if spec.has_single_scale:
        return replace(operand, factor=round_to_fp32(1.0 / tile_pass.scale), scale=tile_pass.scale)
    if spec.scheme == "nvfp4":
        return replace(operand, factor=amax)
    shift = choose_shift(result.smallest, result.largest, spec.element)
    if shift == 1.0:
        return operand
    shifted = dispatch.run_tile_pass(x_MK, replace(tile_pass, shift=shift))
    return replace(operand, values=shifted.values, factor=1.0 / shift)


def choose_shift(smallest: float, largest: float, element: Format) -> float:
    """Return the power of two that keeps code * scale_inv exact in BF16.

    The shift is 1.0 unless a scale is in one of the outermost binades.

    Args:
        smallest: The smallest scale_inv of the tensor.
        largest: The largest scale_inv of the tensor.
        element: The element format.
    """
    low, high = _floor_log2(smallest), _floor_log2(largest)
    highest_exact = 127 - _floor_log2(element.max)
    lowest_exact = -126 - (element.min_exponent - element.mantissa_bits)
    if high > highest_exact:
        return 2.0 ** (highest_exact - high)
    if low < lowest_exact:
        return 2.0 ** min(lowest_exact - low, highest_exact - high)
    return 1.0


def _floor_log2(x: float) -> int:
    """Return floor(log2(x)) of a positive number."""
    return math.frexp(x)[1] - 1


def make_stored_operand(stored: Quantised, role: str, *, columnwise: bool = False) -> GemmOperand:
    """Return the operand of codes and scales that exist already, such as an FP8-stored weight."""
    spec = stored.spec
    reads_column = columnwise
    if spec.copies_share_values:  # then either copy serves
        reads_column = stored.codes is None
    _, scale_inv = stored.copy(reads_column)
    factor = shift = 1.0
    if spec.has_single_scale:
        factor = scale_inv.item()
    elif spec.scheme == "nvfp4":
        amax = stored.amax
        if reads_column and stored.amax_t is not None:
            amax = stored.amax_t
        factor = amax.item()
    elif scale_inv.numel():
        smallest, largest = scale_inv.aminmax()
        low, high = smallest.item(), largest.item()
        if spec.scheme == "mxfp8":
            low, high = 2.0 ** (low - 127), 2.0 ** (high - 127)
        shift = choose_shift(low, high, spec.element)
        factor = 1.0 / shift
    values = dispatch.decode_stored(stored, columnwise=reads_column, shift=shift)
    return GemmOperand(
        role=role, spec=spec, columnwise=columnwise, values=values, factor=factor, amax=None
    )
