"""One pass over a matrix in plain torch: largest magnitudes, scales, rounding.

It defines what the C kernel does.

A pass cuts x_MK into tiles, takes each tile's largest magnitude, turns it into a scale by one of
four rules, rounds the scaled elements to the grid, and returns one of two things:

- *codes*, one byte per value, with the scales: for storage, checkpoints and comparisons;
- *operand values* in BF16, codes * scale_inv: the emulated GEMM multiplies them. Both factors have
  few enough bits for the product to be exact; `shift` keeps it clear of BF16's outermost binades
  where a tensor lives there.

The work is done a few rows at a time, so that no FP32 copy of the matrix exists at any moment and
the temporaries stay in the processor's cache.

Shapes: M rows, K columns, B and C numbers of tiles along rows and columns, R and S rows and columns
of a tile.
"""

# ruff: noqa: N803, N806  (shape suffixes are capitals)
from collections.abc import Iterator
from dataclasses import dataclass

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
    columnwise: bool
    scale: float = 1.0
    """FP32 scale of the whole tensor, under NVFP4 its S_enc; not read under the other rules."""
    codes: bool = False
    """Whether the result is codes rather than operand values in BF16."""
    shift: float = 1.0
    """Power of two that operand values are multiplied by."""
    seed: int | None = None
    """Seed of stochastic rounding; None rounds to nearest."""
    measure: bool = True
    """Measure the amax also under the rule "tensor", which does not need it."""

    @property
    def hadamard(self) -> bool:
        """Whether the random Hadamard transform of the matrix is quantised (`hadamard.py`).

        `run_tile_pass` below expects a matrix that is already transformed.
        """
        return self.columnwise and self.spec.hadamard

    @property
    def result_dtype(self) -> torch.dtype:
        """uint8 for codes, BF16 for operand values."""
        if self.codes:
            return torch.uint8
        return torch.bfloat16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TileResult:
    """Result of a pass."""

    values: torch.Tensor
    """(M, K): codes in uint8, or operand values in BF16."""
    scale_inv: torch.Tensor | None
    """(B, C) dequantisation scales in FP32; None under the rule "tensor".

    Those of MXFP8 are biased exponents, and those of NVFP4 the E4M3 codes of S_dec, in uint8.
    """
    amax: float
    """Largest magnitude of the matrix; 0 where it was not measured."""
    smallest: float = 1.0
    """Smallest scale_inv of a tile that is not all zeros; 1.0 without one."""
    largest: float = 1.0
    """Largest scale_inv of such a tile; 1.0 without one."""


def compute_amax_over(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Return the largest magnitude over `dims` in FP32.

    NaN counts as 0. The amax of an empty tensor is 0.
    """
    magnitude = torch.where(x.isnan(), torch.zeros_like(x), x.abs())
    if not x.numel():
        return magnitude.sum(dims).float()
    return magnitude.amax(dims).float()


def iterate_row_chunks(x_MK: torch.Tensor, multiple: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows, (start, end), that start at multiples of `multiple`.

    A range has at most the chunk's bytes, or `multiple` rows. An empty matrix has no range.
    """
    if not x_MK.numel():
        return
    budget_bytes = DEVICE_CHUNK_BYTES
    if x_MK.device.type == "cpu":
        budget_bytes = CPU_CHUNK_BYTES
    step = max(1, budget_bytes // max(1, 4 * x_MK.shape[1] * multiple)) * multiple
    for start in range(0, x_MK.shape[0], step):
        yield start, min(start + step, x_MK.shape[0])


def run_tile_pass(x_MK: torch.Tensor, tile_pass: TilePass) -> TileResult:
    """Quantise a matrix in FP32, BF16 or FP16, on any device and with any strides.

    NaN does not count for a scale.
    """
    rows, columns = x_MK.shape
    tile = tile_pass.spec.tile(tile_pass.columnwise)
    if tile == WHOLE_TENSOR:
        tile = (1, max(1, columns))
    values = torch.empty(rows, columns, dtype=tile_pass.result_dtype, device=x_MK.device)
    scales, amaxes = [], []
    for start, end in iterate_row_chunks(x_MK, tile[0]):
        amax_BC, scale_inv_BC = _quantise_chunk(
            x_MK[start:end], values[start:end], tile_pass, tile, start
        )
        scales.append(scale_inv_BC)
        amaxes.append(amax_BC)
    if not amaxes:
        nothing = torch.zeros(-(-rows // tile[0]), -(-columns // tile[1]), device=x_MK.device)
        scales, amaxes = [nothing], [nothing]
    amax_BC, scale_inv_BC = torch.cat(amaxes), torch.cat(scales)
    amax = compute_amax_over(amax_BC, (0, 1)).item()
    rule = tile_pass.spec.scale_rule
    if rule == "tensor":
        return TileResult(values=values, scale_inv=None, amax=amax)
    scales_of_nonzero_tiles = scale_inv_BC[amax_BC > 0]
    smallest = largest = 1.0
    if scales_of_nonzero_tiles.numel():
        smallest = scales_of_nonzero_tiles.min().item()
        largest = scales_of_nonzero_tiles.max().item()
    if rule == "e8m0":
        scale_inv_BC = compute_e8m0_exponent(amax_BC, tile_pass.spec.element.max).to(torch.uint8)
    elif rule == "nvfp4":
        scale_inv_BC = encode(scale_inv_BC, FORMATS["e4m3"])
    return TileResult(
        values=values, scale_inv=scale_inv_BC, amax=amax, smallest=smallest, largest=largest
    )


def _quantise_chunk(
    x_MK: torch.Tensor, out_MK: torch.Tensor, tile_pass: TilePass, tile: Tile, first_row: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise some rows into `out_MK`; return amax and scale_inv of their tiles."""
    x_BRCS = _split_into_tiles(x_MK.float(), tile)
    element = tile_pass.spec.element
    if tile_pass.spec.scale_rule != "tensor" or tile_pass.measure:
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
    if tile_pass.codes:
        rounded = encode(rounded, element)
    else:
        rounded *= (scale_inv_BC * tile_pass.shift)[:, None, :, None]
        # Exact in BF16; what lies below BF16 is cut off, not rounded.
        rounded.view(torch.int32).bitwise_and_(-0x10000)
    flat = rounded.reshape(rounded.shape[0] * rounded.shape[1], -1)
    out_MK.copy_(flat[: out_MK.shape[0], : out_MK.shape[1]])
    return amax_BC, scale_inv_BC


def _split_into_tiles(x_MK: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Return a (B, R, C, S) view, padded with zeros to whole tiles; zeros change no amax."""
    height, width = tile
    missing_rows, missing_columns = -x_MK.shape[0] % height, -x_MK.shape[1] % width
    if missing_rows or missing_columns:
        x_MK = torch.nn.functional.pad(x_MK, (0, missing_columns, 0, missing_rows))
    rows, columns = x_MK.shape
    return x_MK.reshape(rows // height, height, columns // width, width)


def _compute_scales(
    amax_BC: torch.Tensor, dtype: torch.dtype, tile_pass: TilePass
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and scale_inv of some tiles, in FP32.

    Under the rule "tensor" scale_inv is 1: the scale of the tensor is taken out of the product.
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
        decode_BC, encode_BC = compute_nvfp4_block_scales(amax_BC, tile_pass.scale)
        return encode_BC, decode_BC
    return torch.full_like(amax_BC, tile_pass.scale), torch.ones_like(amax_BC)
