"""Casts of shards, for the distributed optimizer with stored weights.

Each rank has a flat part of a weight's master. It computes the amaxes of the part, which are reduced
over the ranks, and casts the part with the scales of the whole weight. NVFP4 keeps the scales of its
tiles between the two steps, and stores two codes a byte. Its column-wise copy is made of the row-wise
copy after all parts are gathered.

Source: pytorch/csrc/extensions/partial_cast.cpp, nvfp4_2d_partial_cast.cpp;
pytorch/tensor/utils.py of 2.20.2, which calls them.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 torch's own abbreviation
from torch import Tensor

from bridge.precision.formats import FORMATS
from bridge.runtime.megatron.te_cpu.storage import FORMAT_NAMES
from bridge.runtime.numerics.grid import encode, round_to_grid
from bridge.runtime.numerics.quantised import pack_nibbles, unpack_nibbles
from bridge.runtime.numerics.scaling import compute_nvfp4_block_scales, compute_nvfp4_tensor_scale

Tensors = list[Tensor]


def _compute_tile_amaxes(
    part: Tensor, tile: tuple[int, int], rows: int, columns: int, start: int
) -> Tensor:
    """Return the amax of each tile of a matrix, (B, C), over the elements in a flat part.

    Args:
        part: Consecutive elements of the flat matrix.
        tile: Rows and columns of a tile. Ragged edges make smaller tiles.
        rows: Rows of the matrix.
        columns: Columns of the matrix.
        start: Index of the first element of the part.
    """
    whole = torch.zeros(rows * columns, dtype=torch.float32)
    whole[start : start + part.numel()] = part.detach().float().abs().reshape(-1)
    height, width = tile
    padded = F.pad(whole.view(rows, columns), (0, -columns % width, 0, -rows % height))
    return padded.view(padded.shape[0] // height, height, -1, width).amax((1, 3))


def _write_amaxes(padded: Tensor, part: Tensor, tile: tuple[int, int], *place: int) -> None:
    """Write the amaxes of tiles into a padded tensor; `place` is rows, columns and start."""
    amaxes = _compute_tile_amaxes(part, tile, *place)
    padded.zero_()
    padded[: amaxes.shape[0], : amaxes.shape[1]].copy_(amaxes)


def _quantise_part(
    part: Tensor,
    name: str,
    factors: Tensor,
    tile: tuple[int, int],
    rows: int,
    columns: int,
    start: int,
) -> Tensor:
    """Return the codes of a flat part of a matrix, saturated, from a scale per tile.

    The other arguments are those of `_compute_tile_amaxes`.
    """
    element = FORMATS[name]
    spread = factors.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)[:rows, :columns]
    scaled = part.detach().float().reshape(-1) * spread.reshape(-1)[start : start + part.numel()]
    return encode(round_to_grid(scaled, element), element)


def fp8_block_scaling_compute_partial_amax(
    part: Tensor, amax: Tensor, rows: int, columns: int, start: int, size: int
) -> None:
    """Write the amax of each square tile, of the elements in a flat part of a matrix."""
    _write_amaxes(amax, part, (size, size), rows, columns, start)


def fp8_block_scaling_partial_cast(
    part: Tensor,
    out: Tensor,
    scale: Tensor,
    rows: int,
    columns: int,
    start: int,
    size: int,
    dtype: Any,
) -> None:
    """Write the codes of a flat part of a matrix, with the scales of its square tiles."""
    name = FORMAT_NAMES[int(dtype)]
    codes = _quantise_part(part, name, scale, (size, size), rows, columns, start)
    out.view(-1).copy_(codes)


def mxfp8_scaling_compute_partial_amax(
    part: Tensor, amax_rowwise: Tensor, amax_colwise: Tensor, rows: int, columns: int, start: int
) -> None:
    """Write the amax of each 1x32 and each 32x1 tile, of the elements in a flat part."""
    for amax, tile in ((amax_rowwise, (1, 32)), (amax_colwise, (32, 1))):
        _write_amaxes(amax, part, tile, rows, columns, start)


def mxfp8_scaling_partial_cast(
    part: Tensor,
    row: Tensor,
    column: Tensor,
    row_exponents: Tensor,
    column_exponents: Tensor,
    *place: int,
) -> None:
    """Write both copies' codes of a flat part of a matrix, with exponents of the whole."""
    copies = ((row, row_exponents, (1, 32)), (column, column_exponents, (32, 1)))
    for out, exponents, tile in copies:
        factors = torch.ldexp(torch.ones(()), 127 - exponents.to(torch.int32))
        out.view(-1).copy_(_quantise_part(part, "e4m3", factors, tile, *place))


def nvfp4_multi_tensor_compute_partial_amax(*lists_and_size: Any) -> None:
    """Write the amax of each square tile, and of all elements, of flat parts of matrices.

    Arguments: parts, amaxes, amaxes of the whole, rows, columns, starts, and the tile's length.
    """
    *lists, size = lists_and_size
    for part, amax, whole, *place in zip(*lists, strict=True):
        amax.copy_(_compute_tile_amaxes(part, (size, size), *place))
        whole.copy_(amax.max())


def nvfp4_compute_global_scale(amaxes: Tensor, scales: Tensor) -> None:
    """Write the factor of each whole tensor from its amax."""
    factors = [compute_nvfp4_tensor_scale(amax) for amax in amaxes.tolist()]
    scales.copy_(torch.tensor(factors))


def nvfp4_multi_tensor_fused_scale(*lists_and_size: Any) -> None:
    """Write the factors of square tiles, and scales and amaxes into quantised tensors.

    There is one scale per row. Arguments: amaxes, amaxes of the whole, factors, scales and amaxes
    of the quantised tensors, rows and columns of tiles, padded rows, and the tile's length.
    """
    *lists, size = lists_and_size
    for amax, whole, factor, scale, stored_amax, _rows, columns, _padded in zip(
        *lists, strict=True
    ):
        decoded, encoded = compute_nvfp4_block_scales(
            amax, compute_nvfp4_tensor_scale(whole.item())
        )
        factor.copy_(encoded)
        stored_amax.copy_(whole)
        codes = encode(decoded, FORMATS["e4m3"]).repeat_interleave(size, 0)[: len(scale)]
        scale[: len(codes), :columns].copy_(codes.view(scale.dtype))


def nvfp4_multi_tensor_2d_partial_cast(
    parts: Tensors, outs: Tensors, factors: Tensors, _whole_scales: Tensors, *places_and_size: Any
) -> None:
    """Write the codes of flat parts of matrices, two a byte, with the factors of their tiles.

    Further arguments: rows, columns, starts, and the tile's length. The scales
    of the whole are in the factors.
    """
    *places, size = places_and_size
    for part, out, factor, *place in zip(parts, outs, factors, *places, strict=True):
        if place[-1] % 2 or part.numel() % 2:
            raise RuntimeError(
                f"NVFP4: a shard must hold whole bytes, got {part.numel()} elements "
                f"from {place[-1]} on"
            )
        codes = _quantise_part(part, "e2m1", factor, (size, size), *place)
        packed = pack_nibbles(codes.reshape(1, -1))
        out.copy_(packed.reshape(out.shape))


def nvfp4_2d_multi_tensor_transpose(
    codes: Tensors,
    codes_t: Tensors,
    scales: Tensors,
    scales_t: Tensors,
    rows: list[int],
    columns: list[int],
) -> None:
    """Write the column-wise copies of matrices that are quantised in tiles of 16 x 16."""
    size = 16
    for packed, out, scale, out_scale, height, width in zip(
        codes, codes_t, scales, scales_t, rows, columns, strict=True
    ):
        unpacked = unpack_nibbles(packed.reshape(height, -1), width)
        transposed = pack_nibbles(unpacked.T.contiguous())
        out.copy_(transposed.reshape(out.shape))
        per_tile = scale[:height:size, : -(-width // size)]
        tiles = per_tile.T.repeat_interleave(size, 0)[: len(out_scale)]
        out_scale[: len(tiles), : tiles.shape[1]].copy_(tiles)
