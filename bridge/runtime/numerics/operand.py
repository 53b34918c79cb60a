# ruff: noqa: N803  (shape suffixes are capitals)
"""Operands of an emulated GEMM: a quantised tensor as BF16 numbers, and one factor for the result.

Everything a low-precision tensor can hold is a BF16 number, so multiplying in BF16 is exact:

| scheme              | operand value       | significant bits | factor on the result              |
|---------------------|---------------------|------------------|-----------------------------------|
| tensorwise, delayed | code                | at most 4        | scale_inv, any FP32 number        |
| blockwise, mxfp8    | code * 2^e          | at most 4        | 1 (or a power of two, see below)  |
| nvfp4               | code * S_dec (E4M3) | at most 2 + 4    | amax, and 1 / (6 * 448)^2 of both |

BF16 ends at 2^128 and has fewer bits below 2^-126. Block scales reach from 2^-127 to 2^127 and
would leave it at both ends, so a tensor with scales out there is multiplied by a power of two
(`shift_for`) that is taken out again on the result. A tensor that lives at *both* ends, more than
2^200 apart, keeps its large values and drops the tiny ones.
"""

import math
from dataclasses import dataclass, replace

import torch

from bridge.precision.formats import Format
from bridge.runtime.numerics import backend
from bridge.runtime.numerics.quantise import draw_seed, tensor_scale
from bridge.runtime.numerics.quantised import Quantised
from bridge.runtime.numerics.scaling import fp32
from bridge.runtime.numerics.spec import QuantSpec
from bridge.runtime.numerics.tiles import TilePass


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GemmOperand:
    """One copy of a tensor, ready to be multiplied."""

    role: str
    """input, weight or grad_output."""
    spec: QuantSpec
    columnwise: bool
    values: torch.Tensor
    """(M, K) BF16, in the axes of the tensor itself."""
    factor: float
    """Factor of the result, an FP32 number."""
    amax: float | None
    """Largest magnitude before quantisation; None for stored codes."""
    scale: float | None = None
    """The factor the whole tensor went in with.

    None where tiles have their own, or codes were stored.
    """


def make_operand(
    x_MK: torch.Tensor,
    spec: QuantSpec,
    role: str,
    *,
    columnwise: bool = False,
    scale: float | None = None,
    generator: torch.Generator | None = None,
) -> GemmOperand:
    """Round a matrix in FP32, BF16 or FP16 to the grid of its scheme, as the operand of a role.

    `scale` is a stored factor, None computes it; stochastic rounding draws its seed from
    `generator`. The operand's values * factor is what `quantise(...).dequantise()` returns. After a
    Hadamard transform the rows are padded to a multiple of 16.
    """
    amax = None
    if scale is None and spec.needs_amax:
        amax = backend.amax(x_MK, hadamard=columnwise and spec.hadamard)
        scale = tensor_scale(amax, spec)
    seed = None
    if spec.stochastic:
        seed = draw_seed(generator)
    factor = 1.0 if scale is None else scale
    todo = TilePass(spec=spec, columnwise=columnwise, scale=factor, seed=seed, measure=amax is None)
    result = backend.run(x_MK, todo)
    if amax is None:
        amax = result.amax
    factor, kept_scale = 1.0, None
    if spec.whole_tensor:
        kept_scale = scale
        if scale is not None:
            factor = fp32(1.0 / scale)
    elif spec.scheme == "nvfp4":
        factor = amax
    else:
        shift = shift_for(result.smallest, result.largest, spec.element)
        if shift != 1.0:
            result, factor = backend.run(x_MK, replace(todo, shift=shift)), 1.0 / shift
    return GemmOperand(
        role=role,
        spec=spec,
        columnwise=columnwise,
        values=result.values,
        factor=factor,
        amax=amax,
        scale=kept_scale,
    )


def shift_for(smallest: float, largest: float, element: Format) -> float:
    """Return the power of two that keeps code * scale exact in BF16.

    `smallest` and `largest` are scale_inv of the tensor. It is 1.0 for all but the outermost
    scales.
    """
    low, high = math.frexp(smallest)[1] - 1, math.frexp(largest)[1] - 1
    most = 127 - (math.frexp(element.max)[1] - 1)
    least = -126 - (element.min_exponent - element.mantissa_bits)
    if high > most:
        return 2.0 ** (most - high)
    if low < least:
        return 2.0 ** min(least - low, most - high)
    return 1.0


def stored_operand(stored: Quantised, role: str, *, columnwise: bool = False) -> GemmOperand:
    """Return the operand of codes and scales that exist already, such as an FP8-stored weight."""
    spec = stored.spec
    is_column = columnwise  # of the two copies that are stored
    if spec.copies_share_values:
        is_column = stored.codes is None
    _, scale_inv = stored.copy(is_column)
    factor = shift = 1.0
    if spec.whole_tensor:
        factor = scale_inv.item()
    elif spec.scheme == "nvfp4":
        amax = stored.amax
        if is_column and stored.amax_t is not None:
            amax = stored.amax_t
        factor = amax.item()
    elif scale_inv.numel():
        smallest, largest = scale_inv.aminmax()
        low, high = smallest.item(), largest.item()
        if spec.scheme == "mxfp8":
            low, high = 2.0 ** (low - 127), 2.0 ** (high - 127)
        shift = shift_for(low, high, spec.element)
        factor = 1.0 / shift
    values = backend.decoded(stored, columnwise=is_column, shift=shift)
    return GemmOperand(
        role=role, spec=spec, columnwise=columnwise, values=values, factor=factor, amax=None
    )
