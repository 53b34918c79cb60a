# ruff: noqa: N803  (shape suffixes are capitals)
"""Dispatch of a pass over a matrix, to the C kernel or to plain torch, with the same bits."""

import math

import torch

from bridge.runtime.numerics import native, tiles
from bridge.runtime.numerics.hadamard import transform_columns
from bridge.runtime.numerics.quantised import Quantised, pack_nibbles
from bridge.runtime.numerics.tiles import TilePass, TileResult


def compute_amax(x_MK: torch.Tensor, *, hadamard: bool = False) -> float:
    """Return the largest magnitude of a matrix, or of its Hadamard transform.

    NaN does not count. The amax of a matrix without elements is 0.
    """
    kernel = native.get_kernel(x_MK)
    if kernel is not None:
        return kernel.amax(x_MK, hadamard=hadamard)
    if not x_MK.numel():
        return 0.0
    if hadamard:
        return compute_amax(transform_columns(x_MK))
    # aminmax is several times faster than abs().amax(). With a NaN it returns nothing but NaN.
    low, high = x_MK.aminmax()
    if not math.isnan(low.item()):
        return max(-low.item(), high.item())
    amaxes = []
    for start, end in tiles.iterate_row_chunks(x_MK, 1):
        amaxes.append(tiles.compute_amax_over(x_MK[start:end], (0, 1)))
    return torch.stack(amaxes).amax().item()


def run_tile_pass(x_MK: torch.Tensor, tile_pass: TilePass) -> TileResult:
    """Run a quantisation pass over a matrix."""
    kernel = native.get_kernel(x_MK)
    if kernel is not None and kernel.can_run(tile_pass):
        return kernel.run(x_MK, tile_pass)
    if tile_pass.hadamard:
        return tiles.run_tile_pass(transform_columns(x_MK), tile_pass)
    return tiles.run_tile_pass(x_MK, tile_pass)


def decode_stored(stored: Quantised, *, columnwise: bool, shift: float) -> torch.Tensor:
    """Return code * scale_inv * shift of a stored copy in BF16, in the axes of the tensor.

    Where the whole tensor has a single scale the result is the values of the codes alone.
    """
    codes, _ = stored.copy(columnwise)
    kernel = native.get_kernel(codes)
    if kernel is not None:
        return kernel.decode(stored, columnwise=columnwise, shift=shift)
    values = stored.values(columnwise, torch.bfloat16)
    if not stored.spec.has_single_scale:
        scales = stored.get_tile_scales(columnwise) * shift
        values = values.mul_(stored.expand_scales(scales, columnwise, torch.bfloat16))
    return values.contiguous()


def lay_out_codes(codes: torch.Tensor, *, transposed: bool, packed: bool) -> torch.Tensor:
    """Return codes as they are stored.

    Args:
        codes: (M, K), contiguous, a byte per code.
        transposed: Whether the axes are exchanged.
        packed: Whether two codes of 4 bits share a byte.
    """
    kernel = native.get_kernel(codes)
    if kernel is not None and (transposed or packed):
        return kernel.lay_out(codes, transposed=transposed, packed=packed)
    if transposed:
        codes = codes.T.contiguous()
    if packed:
        codes = pack_nibbles(codes)
    return codes
