# ruff: noqa: N806  (shape suffixes are capitals)
"""A quantised tensor: codes and scales in Transformer Engine's layout, and their dequantisation.

Shapes: M rows (all leading axes together), K columns, B and C numbers of tiles.

| scheme     | codes             | scale_inv            | codes_t           | scale_inv_t         |
|------------|-------------------|----------------------|-------------------|---------------------|
| tensorwise | (M, K)            | (1,) FP32            | (K, M)            | (1,) FP32           |
| delayed    | (M, K)            | (1,) FP32            | (K, M)            | (1,) FP32           |
| blockwise  | (M, K)            | (B, C) FP32          | (K, M)            | (C, B) FP32         |
| mxfp8      | (M, K)            | (M, K/32) exponents  | (M, K), as it is  | (M/32, K) exponents |
| nvfp4      | (M, K/2) 2 a byte | (M, K/16) E4M3 codes | (K, M/2) 2 a byte | (K, M/16) E4M3      |

Scales are compact here, one per tile; `padded_scales` gives the padded form that Transformer
Engine's GEMMs read. NVFP4 and MXFP8 repeat the scale of a square tile for each of its rows, as
Transformer Engine does; blockwise does not.
"""

from dataclasses import dataclass

import torch

from bridge.errors import PrecisionTypeError
from bridge.precision.formats import FORMATS
from bridge.precision.schemes import Tile
from bridge.runtime.numerics.grid import decode
from bridge.runtime.numerics.scaling import NVFP4_MAX, e8m0_value
from bridge.runtime.numerics.spec import QuantSpec


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Quantised:
    """A tensor in a low-precision format."""

    spec: QuantSpec
    shape: torch.Size
    """Shape of the tensor before quantisation."""
    dtype: torch.dtype
    """Type of the tensor before quantisation."""
    codes: torch.Tensor | None = None
    """Row-wise codes, uint8."""
    scale_inv: torch.Tensor | None = None
    """Row-wise dequantisation scales."""
    amax: torch.Tensor
    """(1,) FP32: largest magnitude, NaN not counted.

    Of NVFP4 the second level of the row-wise scale.
    """
    codes_t: torch.Tensor | None = None
    """Column-wise codes, transposed except for MXFP8."""
    scale_inv_t: torch.Tensor | None = None
    """Column-wise dequantisation scales."""
    amax_t: torch.Tensor | None = None
    """(1,) FP32: the same for the column-wise copy, after a Hadamard transform."""

    def copy(self, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales of one copy."""
        codes = self.codes_t if columnwise else self.codes
        scales = self.scale_inv_t if columnwise else self.scale_inv
        if codes is None or scales is None:
            copy = "column-wise" if columnwise else "row-wise"
            raise PrecisionTypeError(f"Quantised: the {copy} copy was not made.")
        return codes, scales

    def values(self, columnwise: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the codes' values without the scales, (M, K) in FP32 or BF16.

        They are in the axes of the tensor itself.
        """
        codes, _ = self.copy(columnwise)
        if self.spec.format == "e2m1":
            rows, columns = self.matrix(columnwise)
            count = rows if columnwise else columns
            codes = unpack_nibbles(codes, count)
        values = decode(codes, self.spec.element, dtype)
        if self.is_transposed(columnwise):
            return values.T
        return values

    def tile_scales(self, columnwise: bool = False) -> torch.Tensor:
        """Return the stored scales in FP32, in the axes of the tensor itself.

        Of NVFP4 they are the first level alone.
        """
        _, stored = self.copy(columnwise)
        if self.spec.scheme == "mxfp8":
            return e8m0_value(stored.to(torch.int32))
        if self.spec.scheme == "nvfp4":
            stored = decode(stored, FORMATS["e4m3"])
        if columnwise and not self.spec.whole_tensor:
            return stored.T
        return stored

    def spread(
        self, scales: torch.Tensor, columnwise: bool = False, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return the scale of each element, (M, K), from one per tile as `tile_scales` has them."""
        rows, columns = self.matrix(columnwise)
        scales = scales.to(dtype)
        if self.spec.whole_tensor:
            return scales.expand(rows, columns)
        height, width = self.scale_tile(columnwise)
        return scales.repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :columns]

    def scale_tile(self, columnwise: bool) -> Tile:
        """Return the rows and columns of a stored scale, in the axes of the tensor itself."""
        height, width = self.spec.tile(columnwise)
        if self.spec.scheme == "blockwise":
            return height, width
        if columnwise:
            return height, 1
        return 1, width

    def is_transposed(self, columnwise: bool) -> bool:
        """Return whether codes and scales of a copy are stored with the axes exchanged."""
        return columnwise and self.spec.scheme != "mxfp8"

    def dequantise(
        self, dtype: torch.dtype | None = None, *, columnwise: bool = False
    ) -> torch.Tensor:
        """Return code * scale_inv, computed in FP32 and rounded once to `dtype`.

        None is the dtype before quantisation. The tensor is in its own axes and shape; after a
        Hadamard transform the column-wise copy is the transformed one, with its rows padded to a
        multiple of 16. Exact wherever `dtype` can hold the product. NaN codes give NaN.

        Source: Transformer Engine 2.20 common/cast/nvfp4/dequantize_nvfp4.cuh (order of NVFP4's
            factors).
        """
        scale_MK = self.spread(self.tile_scales(columnwise), columnwise)
        if self.spec.scheme == "nvfp4":
            amax = self.amax
            if columnwise and self.amax_t is not None:
                amax = self.amax_t
            scale_MK = scale_MK * amax * torch.tensor(1.0 / NVFP4_MAX, dtype=torch.float32)
        result = (self.values(columnwise) * scale_MK).to(dtype or self.dtype)
        if result.numel() != self.shape.numel():
            return result
        return result.reshape(self.shape)

    def matrix(self, columnwise: bool) -> tuple[int, int]:
        """Return rows and columns of a copy, in the axes of the tensor itself."""
        columns = self.shape[-1]
        rows = self.shape[:-1].numel()
        if columnwise and self.spec.hadamard:
            rows = -(-rows // 16) * 16
        return rows, columns


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Return 4-bit codes two to a byte along the last axis.

    The even code is in the low half. An odd end is filled with 0.
    """
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first `count` 4-bit codes of each row."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :count]


def padded_scales(quantised: Quantised, *, columnwise: bool = False) -> torch.Tensor:
    """Return the scales as Transformer Engine's GEMMs read them.

    They are padded with zeros, and for 1x128 tiles transposed. Swizzling, which cuBLAS asks for as
    well, is a matter of the GEMM call and not done here.

    Source: Transformer Engine 2.20 pytorch/csrc/quantizer.cpp:1441-1493 (blockwise), :1852-1881
        (MXFP8); pytorch/tensor/float8_blockwise_tensor.py:162-211.
    """
    _, scales = quantised.copy(columnwise)
    spec = quantised.spec
    if spec.whole_tensor:
        return scales
    row_multiple, column_multiple = 128, 4
    if spec.scheme == "blockwise":
        row_multiple = 1
        height, width = spec.tile(columnwise)
        if height != width:
            scales = scales.T
    elif spec.scheme == "mxfp8" and columnwise:
        row_multiple, column_multiple = 4, 128
    rows, columns = scales.shape
    missing = (0, -columns % column_multiple, 0, -rows % row_multiple)
    return torch.nn.functional.pad(scales, missing).contiguous()
