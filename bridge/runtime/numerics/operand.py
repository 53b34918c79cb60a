# ruff: noqa: N803  (shape suffixes are capitals)
"""Operands of an emulated GEMM: a quantised tensor as BF16 numbers, and a factor on the result.

Every value of a low-precision tensor is a BF16 number, or a BF16 number times a factor of the whole
tensor. So the GEMM multiplies the BF16 numbers, which is exact, and applies the factors of both
operands to the FP32 sums:

| scheme              | operand value       | significant bits | factor on the result              |
|---------------------|---------------------|------------------|-----------------------------------|
| tensorwise, delayed | code                | at most 4        | scale_inv, any FP32 number        |
| blockwise, mxfp8    | code * 2^e          | at most 4        | 1 (or a power of two, see below)  |
| nvfp4               | code * S_dec (E4M3) | at most 2 + 4    | amax, and 1 / (6 * 448)^2 of both |

BF16 ends at 2^128 and has fewer bits below 2^-126. Block scales reach from 2^-127 to 2^127, and
their products with codes would leave BF16 at both ends. A tensor with such scales is multiplied by
a power of two (`choose_shift`), and the result of the GEMM is divided by it. A tensor with values
at *both* ends, more than 2^200 apart, keeps its large values and loses the tiny ones.
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
    output_factor: float
    """Factor on the result of a GEMM, an FP32 number.

    Under NVFP4 it is the amax. `gemm.compute_operand_factor` also has the constant 1 / (6 * 448).
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

    The operand's values times `gemm.compute_operand_factor` are the tensor that
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
    amax = None
    if scale is None and spec.needs_amax:
        amax = dispatch.compute_amax(x_MK, hadamard=columnwise and spec.hadamard)
        scale = compute_tensor_scale(amax, spec)
    if scale is None:
        scale = 1.0  # not read: the scheme has a scale per tile
    seed = None
    if spec.stochastic:
        seed = draw_seed(generator)
    tile_pass = TilePass(
        spec=spec, columnwise=columnwise, scale=scale, seed=seed, measure=amax is None
    )
    return _run_operand_pass(x_MK, role, tile_pass, amax)


def _run_operand_pass(
    x_MK: torch.Tensor, role: str, tile_pass: TilePass, amax: float | None
) -> GemmOperand:
    """Return the operand that a pass over a matrix makes.

    Args:
        x_MK: FP32, BF16 or FP16.
        role: input, weight or grad_output.
        tile_pass: Parameters of the pass, without a shift.
        amax: Largest magnitude of the matrix. None takes the amax that the pass measures.
    """
    spec = tile_pass.spec
    result = dispatch.run_tile_pass(x_MK, tile_pass)
    if amax is None:
        amax = result.amax
    operand = GemmOperand(
        role=role,
        spec=spec,
        columnwise=tile_pass.columnwise,
        values=result.values,
        output_factor=1.0,
        amax=amax,
    )
    if spec.has_single_scale:
        scale = tile_pass.scale
        return replace(operand, output_factor=round_to_fp32(1.0 / scale), scale=scale)
    if spec.scheme == "nvfp4":
        return replace(operand, output_factor=amax)
    shift = choose_shift(result.smallest, result.largest, spec.element)
    if shift == 1.0:
        return operand
    # Rare: the scales are known only after a pass, and the shift needs a second pass.
    shifted = dispatch.run_tile_pass(x_MK, replace(tile_pass, shift=shift))
    return replace(operand, values=shifted.values, output_factor=1.0 / shift)


def choose_shift(smallest: float, largest: float, element: Format) -> float:
    """Return the power of two that keeps code * scale_inv exact in BF16.

    The shift is 1.0 unless a scale is in one of the outermost binades of BF16.

    Args:
        smallest: The smallest scale_inv of the tensor.
        largest: The largest scale_inv of the tensor.
        element: The element format.
    """
    smallest_log2, largest_log2 = _floor_log2(smallest), _floor_log2(largest)
    # The largest code stays below 2^128, and the smallest subnormal code is at least 2^-126.
    highest_exact_log2 = 127 - _floor_log2(element.max)
    lowest_exact_log2 = -126 - (element.min_exponent - element.mantissa_bits)
    if largest_log2 > highest_exact_log2:
        return 2.0 ** (highest_exact_log2 - largest_log2)
    if smallest_log2 < lowest_exact_log2:
        # The large values keep their bits if both ends cannot.
        needed_log2 = lowest_exact_log2 - smallest_log2
        return 2.0 ** min(needed_log2, highest_exact_log2 - largest_log2)
    return 1.0


def _floor_log2(x: float) -> int:
    """Return floor(log2(x)) of a positive number."""
    return math.frexp(x)[1] - 1


def make_stored_operand(stored: Quantised, role: str, *, columnwise: bool = False) -> GemmOperand:
    """Return the operand of codes and scales that exist already, for example of a stored weight.

    Args:
        stored: The codes and scales.
        role: input, weight or grad_output.
        columnwise: Which copy is returned.

    Raises:
        PrecisionTypeError: The copy was not made.
    """
    spec = stored.spec
    reads_columnwise = columnwise
    if spec.copies_share_values:  # the copy that exists is read
        reads_columnwise = stored.codes is None
    _, scale_inv = stored.copy(reads_columnwise)
    output_factor = shift = 1.0
    if spec.has_single_scale:
        output_factor = scale_inv.item()
    elif spec.scheme == "nvfp4":
        amax = stored.amax
        if reads_columnwise and stored.amax_t is not None:
            amax = stored.amax_t
        output_factor = amax.item()
    elif scale_inv.numel():
        edges = scale_inv.aminmax()
        smallest, largest = edges.min.item(), edges.max.item()
        if spec.scheme == "mxfp8":  # whose scales are biased exponents
            smallest, largest = 2.0 ** (smallest - 127), 2.0 ** (largest - 127)
        shift = choose_shift(smallest, largest, spec.element)
        output_factor = 1.0 / shift
    values = dispatch.decode_stored(stored, columnwise=reads_columnwise, shift=shift)
    return GemmOperand(
        role=role,
        spec=spec,
        columnwise=columnwise,
        values=values,
        output_factor=output_factor,
        amax=None,
    )
