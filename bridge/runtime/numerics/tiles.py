"""`run_torch_pass`: one pass over a matrix in plain torch: largest magnitudes, scales, rounding.

It defines the result of the C kernel, bit for bit. A pass has these steps:

1. Cut x_MK into tiles, and take the largest magnitude of each tile.
2. Compute the scale of each tile by one of four rules (`QuantSpec.scale_rule`).
3. Multiply each element by the scale of its tile, and round it to the grid of the format.
4. Return *codes*, a byte per value, with the scales, for storage, checkpoints and comparisons. Or
   return *operand values* in BF16, code * scale_inv, for the emulated GEMM. Code and scale_inv have
   so few bits that the product is exact. If the product would reach BF16's outermost binades, it is
   also multiplied by `range_multiplier`, which moves it away from them.

The pass works on a few rows at a time. So there is never an FP32 copy of the whole matrix, and the
temporaries stay in the processor's cache.

Shapes: M rows, K columns, B and C numbers of tiles along rows and columns, R and S rows and columns
of a tile.
"""

# ruff: noqa: N803, N806  (shape suffixes are capitals)
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bridge.precision.formats import FORMATS
from bridge.precision.schemes import WHOLE_TENSOR, Tile
from bridge.runtime.numerics.grid import draw_random_units, encode, round_to_grid
from bridge.runtime.numerics.scaling import (
    compute_e8m0_exponent,
    compute_nvfp4_block_scales,
    compute_scale,
    decode_e8m0,
    divide,
)
from bridge.runtime.numerics.spec import QuantSpec

CPU_CHUNK_BYTES = 1 << 20
"""FP32 bytes that a CPU works on at a time."""
DEVICE_CHUNK_BYTES = 1 << 26
"""FP32 bytes that any other device works on at a time."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TilePass:
    """Parameters of a pass."""

    spec: QuantSpec
    """Format, scale rule and tiles."""
    columnwise: bool
    """Whether the column-wise copy is made. False: the row-wise copy."""
    tensor_scale: float = 1.0
    """FP32 scale of the whole tensor, under NVFP4 S_enc. It is 1.0 if only tiles have scales."""
    makes_codes: bool = False
    """Whether the result is codes rather than operand values in BF16."""
    range_multiplier: float = 1.0
    """Power of two that multiplies operand values, so that they stay in BF16's range."""
    seed: int | None = None
    """Seed of stochastic rounding. None: rounding to nearest."""
    measures_amax: bool = True
    """Whether the amax is also measured under the rule "tensor", which does not need it."""

    @property
    def has_transform(self) -> bool:
        """Whether the matrix is quantised after a random Hadamard transform (`hadamard.py`).

        `run_torch_pass` expects a matrix that is transformed already.
        """
        return self.spec.is_transformed(self.columnwise)

    @property
    def result_dtype(self) -> torch.dtype:
        """uint8 for codes, BF16 for operand values."""
        if self.makes_codes:
            return torch.uint8
        return torch.bfloat16


class ScaleRange(NamedTuple):
    """Smallest and largest scale_inv of some tiles."""

    smallest: float
    largest: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TileResult:
    """Result of a pass."""

    values: torch.Tensor
    """(M, K): codes in uint8, or operand values in BF16."""
    scale_inv: torch.Tensor | None
    """(B, C) dequantisation scales. None: the rule is "tensor".

    They are FP32, or uint8 under MXFP8 (biased exponents) and NVFP4 (E4M3 codes of S_dec).
    """
    amax: float
    """Largest magnitude of the matrix. It is 0 if it was not measured."""
    scale_range: ScaleRange | None = None
    """Range of scale_inv over the tiles that are not all zeros, under the rules "fp32" and "e8m0".

    None: there is no such tile, or the rule is another.
    """


def compute_amax_over(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Return the largest magnitude over some axes in FP32.

    NaN counts as 0. The amax of an empty tensor is 0.

    Args:
        x: Of any floating dtype.
        dims: The axes, which the result does not have.
    """
    magnitude = torch.where(x.isnan(), torch.zeros_like(x), x.abs())
    if not x.numel():
        return magnitude.sum(dims).float()
    return magnitude.amax(dims).float()


def iterate_row_chunks(x_MK: torch.Tensor, multiple: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows, (start, end), that fit into a chunk as FP32.

    An empty matrix has no range.

    Args:
        x_MK: The matrix.
        multiple: Rows of a tile. Each range starts at a multiple of this number, and has at least
            this number of rows, even if they do not fit.
    """
    if not x_MK.numel():
        return
    chunk_bytes = DEVICE_CHUNK_BYTES
    if x_MK.device.type == "cpu":
        chunk_bytes = CPU_CHUNK_BYTES
    bytes_per_multiple = max(1, 4 * x_MK.shape[1] * multiple)
    step = max(1, chunk_bytes // bytes_per_multiple) * multiple
    for start in range(0, x_MK.shape[0], step):
        yield start, min(start + step, x_MK.shape[0])


def run_torch_pass(x_MK: torch.Tensor, tile_pass: TilePass) -> TileResult:
    """Run a quantisation pass over a matrix on any device and with any strides.

    NaN does not count for a scale.

    Args:
        x_MK: FP32, BF16 or FP16. It is transformed already if the pass has a Hadamard transform.
        tile_pass: Parameters of the pass.
    """
    rows, columns = x_MK.shape
    tile = tile_pass.spec.tile(tile_pass.columnwise)
    if tile == WHOLE_TENSOR:  # any tiles can be used, because all have the scale of the tensor
        tile = (1, max(1, columns))
    values = torch.empty(rows, columns, dtype=tile_pass.result_dtype, device=x_MK.device)
    scales, amaxes = [], []
    for start, end in iterate_row_chunks(x_MK, tile[0]):
        amax_BC, scale_inv_BC = _quantise_chunk(
            x_MK[start:end], values[start:end], tile_pass, tile, start
        )
        scales.append(scale_inv_BC)
        amaxes.append(amax_BC)
    if not amaxes:  # an empty matrix
        zeros_BC = torch.zeros(-(-rows // tile[0]), -(-columns // tile[1]), device=x_MK.device)
        scales, amaxes = [zeros_BC], [zeros_BC]
    amax_BC, scale_inv_BC = torch.cat(amaxes), torch.cat(scales)
    amax = compute_amax_over(amax_BC, (0, 1)).item()
    rule = tile_pass.spec.scale_rule
    if rule == "tensor":
        return TileResult(values=values, scale_inv=None, amax=amax)
    if rule == "nvfp4":
        codes_BC = encode(scale_inv_BC, FORMATS["e4m3"])
        return TileResult(values=values, scale_inv=codes_BC, amax=amax)
    scale_range = None
    scales_of_nonzero_tiles = scale_inv_BC[amax_BC > 0]
    if scales_of_nonzero_tiles.numel():
        smallest, largest = torch.stack(scales_of_nonzero_tiles.aminmax()).tolist()
        scale_range = ScaleRange(smallest, largest)
    if rule == "e8m0":
        scale_inv_BC = compute_e8m0_exponent(amax_BC, tile_pass.spec.element.max).to(torch.uint8)
    return TileResult(values=values, scale_inv=scale_inv_BC, amax=amax, scale_range=scale_range)


def _quantise_chunk(
    x_MK: torch.Tensor, out_MK: torch.Tensor, tile_pass: TilePass, tile: Tile, first_row: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise some rows into `out_MK`, and return amax and scale_inv of their tiles, (B, C) FP32.

    Args:
        x_MK: The rows. They are whole tiles, except at the end of the matrix.
        out_MK: Codes or operand values of the rows, to be written.
        tile_pass: Parameters of the pass.
        tile: Rows and columns of a tile.
        first_row: Number of the first row in the matrix, for random numbers.
    """
    x_BRCS = _split_into_tiles(x_MK.float(), tile)
    element = tile_pass.spec.element
    if tile_pass.spec.scale_rule != "tensor" or tile_pass.measures_amax:
        amax_BC = compute_amax_over(x_BRCS, (1, 3))
    else:
        amax_BC = x_BRCS.new_zeros(x_BRCS.shape[0], x_BRCS.shape[2])
    scale_BC, scale_inv_BC = _compute_scales(amax_BC, x_MK.dtype, tile_pass)
    units = None
    if tile_pass.seed is not None:
        units = _split_into_tiles(
            draw_random_units(first_row, x_MK.shape, tile_pass.seed, x_MK.device), tile
        )
    rounded = round_to_grid(x_BRCS * scale_BC[:, None, :, None], element, units)
    if tile_pass.makes_codes:
        rounded = encode(rounded, element)
    else:
        rounded *= (scale_inv_BC * tile_pass.range_multiplier)[:, None, :, None]
        # The product is exact in BF16, the high half of FP32. Only values too small for BF16 have
        # bits in the low half, and they are cut off.
        rounded.view(torch.int32).bitwise_and_(-0x10000)
    flat = rounded.reshape(rounded.shape[0] * rounded.shape[1], -1)
    out_MK.copy_(flat[: out_MK.shape[0], : out_MK.shape[1]])
    return amax_BC, scale_inv_BC


def _split_into_tiles(x_MK: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Return a matrix as (B, R, C, S), padded with zeros to whole tiles. Zeros change no amax."""
    height, width = tile
    missing_rows, missing_columns = -x_MK.shape[0] % height, -x_MK.shape[1] % width
    if missing_rows or missing_columns:
        x_MK = torch.nn.functional.pad(x_MK, (0, missing_columns, 0, missing_rows))
    rows, columns = x_MK.shape
    return x_MK.reshape(rows // height, height, columns // width, width)


def _compute_scales(
    amax_BC: torch.Tensor, dtype: torch.dtype, tile_pass: TilePass
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and scale_inv of some tiles, (B, C) in FP32.

    Under the rule "tensor" scale_inv is 1, because the result of the GEMM is multiplied by the
    tensor's scale_inv instead.

    Args:
        amax_BC: Largest magnitude of each tile.
        dtype: Dtype of the matrix, whose maximum limits the scales of the rule "fp32".
        tile_pass: Parameters of the pass.
    """
    spec, format_max = tile_pass.spec, tile_pass.spec.element.max
    if spec.scale_rule == "fp32":
        scale_BC = compute_scale(
            amax_BC,
            format_max,
            power_of_two=spec.power_of_two_scale,
            eps=spec.eps,
            on_overflow=torch.finfo(dtype).max,
        )
        return scale_BC, divide(1.0, scale_BC)
    if spec.scale_rule == "e8m0":
        exponent_BC = compute_e8m0_exponent(amax_BC, format_max)
        return decode_e8m0(254 - exponent_BC), decode_e8m0(exponent_BC)
    if spec.scale_rule == "nvfp4":
        decode_BC, encode_BC = compute_nvfp4_block_scales(amax_BC, tile_pass.tensor_scale)
        return encode_BC, decode_BC
    return torch.full_like(amax_BC, tile_pass.tensor_scale), torch.ones_like(amax_BC)
