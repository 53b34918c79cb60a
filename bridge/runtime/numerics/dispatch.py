# ruff: noqa: N803, N806  (shape suffixes are capitals)
"""Dispatch of each pass over a matrix to the C kernel or to plain torch, which give the same bits."""

import math

import torch

from bridge.runtime.numerics import native, tiles
from bridge.runtime.numerics.hadamard import transform_columns
from bridge.runtime.numerics.quantised import Quantised, pack_nibbles
from bridge.runtime.numerics.tiles import TilePass, TileResult


def compute_amax(x_MK: torch.Tensor, *, hadamard: bool = False) -> float:
    """Return the largest magnitude of a matrix.

    NaN does not count. The amax of a matrix without elements is 0.

    Args:
        x_MK: FP32, BF16 or FP16.
        hadamard: Whether the matrix is transformed first (`hadamard.py`).
    """
    kernel = native.get_kernel(x_MK)
    if kernel is not None:
        return kernel.compute_amax(x_MK, hadamard=hadamard)
    if not x_MK.numel():
        return 0.0
    if hadamard:
        return compute_amax(transform_columns(x_MK))
    # aminmax is several times faster than abs().amax(). If there is a NaN, it returns only NaN.
    smallest, largest = x_MK.aminmax()
    if not math.isnan(smallest.item()):
        return max(-smallest.item(), largest.item())
    amaxes = []
    for start, end in tiles.iterate_row_chunks(x_MK, 1):
        amaxes.append(tiles.compute_amax_over(x_MK[start:end], (0, 1)))
    return torch.stack(amaxes).amax().item()


def run_tile_pass(x_MK: torch.Tensor, tile_pass: TilePass) -> TileResult:
    """Run a quantisation pass over a matrix.

    `tiles.py` defines the pass: value * scale is rounded to the nearest value of the format. For
    scales that are powers of two, the C kernel rounds the mantissa of a BF16 value as an integer
    and never multiplies, which gives the same bits.
    """
    kernel = native.get_kernel(x_MK)
    if kernel is not None and kernel.can_run(tile_pass):
        return kernel.run(x_MK, tile_pass)
    if tile_pass.has_transform:
        x_MK = transform_columns(x_MK)
    return tiles.run_torch_pass(x_MK, tile_pass)


def decode_stored(stored: Quantised, *, columnwise: bool, range_multiplier: float) -> torch.Tensor:
    """Return code * scale_inv * range_multiplier of a stored copy, (M, K) in BF16, not transposed.

    Under a scheme with a single scale the result has the values of the codes, because the scale is
    applied to the result of the GEMM.

    Args:
        stored: The codes and scales.
        columnwise: Whether the column-wise copy is read.
        range_multiplier: A power of two.
    """
    codes, _ = stored.get_copy(columnwise)
    kernel = native.get_kernel(codes)
    if kernel is not None:
        return kernel.decode(stored, columnwise=columnwise, range_multiplier=range_multiplier)
    values = stored.decode_codes(columnwise, torch.bfloat16)
    if not stored.spec.has_single_scale:
        scales = stored.get_tile_scales(columnwise) * range_multiplier
        values = values.mul_(stored.expand_scales(scales, columnwise, torch.bfloat16))
    return values.contiguous()


def lay_out_codes(codes: torch.Tensor, *, transposed: bool, packed: bool) -> torch.Tensor:
    """Return codes as they are stored.

    Args:
        codes: (M, K) uint8, contiguous, a byte per code.
        transposed: Whether the axes are exchanged.
        packed: Whether two codes of 4 bits share a byte.

    Returns:
        uint8: (M, K); (K, M) if transposed; with half as many bytes in the last axis if packed.
    """
    kernel = native.get_kernel(codes)
    if kernel is not None and (transposed or packed):
        return kernel.lay_out(codes, transposed=transposed, packed=packed)
    if transposed:
        codes = codes.T.contiguous()
    if packed:
        codes = pack_nibbles(codes)
    return codes
