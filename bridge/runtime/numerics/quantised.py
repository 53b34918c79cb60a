# ruff: noqa: N806  (shape suffixes are capitals)
"""`Quantised`: codes and scales of a tensor in Transformer Engine's layout.

Shapes: M rows (all leading axes together), K columns, B and C numbers of tiles.

| scheme     | codes             | scale_inv            | codes_t           | scale_inv_t         |
|------------|-------------------|----------------------|-------------------|---------------------|
| tensorwise | (M, K)            | (1,) FP32            | (K, M)            | (1,) FP32           |
| delayed    | (M, K)            | (1,) FP32            | (K, M)            | (1,) FP32           |
| blockwise  | (M, K)            | (B, C) FP32          | (K, M)            | (C, B) FP32         |
| mxfp8      | (M, K)            | (M, K/32) exponents  | (M, K), as it is  | (M/32, K) exponents |
| nvfp4      | (M, K/2) 2 a byte | (M, K/16) E4M3 codes | (K, M/2) 2 a byte | (K, M/16) E4M3      |

Scales are compact here, one per tile. `pad_scales` returns the padded form that Transformer
Engine's GEMMs read. As in Transformer Engine, NVFP4 and MXFP8 repeat the scale of a square tile for
each of its rows, and blockwise does not.
"""

from dataclasses import dataclass

import torch

from bridge.errors import PrecisionTypeError
from bridge.precision.formats import FORMATS
from bridge.precision.schemes import Tile
from bridge.runtime.numerics.grid import decode
from bridge.runtime.numerics.hadamard import HADAMARD_SIZE
from bridge.runtime.numerics.scaling import NVFP4_MAX, decode_e8m0
from bridge.runtime.numerics.spec import QuantSpec


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Quantised:
    """A tensor in a low-precision format."""

    spec: QuantSpec
    shape: torch.Size
    """Shape of the tensor before quantisation."""
    dtype: torch.dtype
    """Dtype of the tensor before quantisation."""
    codes: torch.Tensor | None = None
    """Row-wise codes, uint8."""
    scale_inv: torch.Tensor | None = None
    """Row-wise dequantisation scales."""
    amax: torch.Tensor
    """(1,) FP32: largest magnitude, NaN not counted.

    Under NVFP4 it is the second level of the row-wise scale.
    """
    codes_t: torch.Tensor | None = None
    """Column-wise codes, transposed except for MXFP8."""
    scale_inv_t: torch.Tensor | None = None
    """Column-wise dequantisation scales."""
    amax_t: torch.Tensor | None = None
    """(1,) FP32: amax of the column-wise copy, after a Hadamard transform if there is one."""

    def get_copy(self, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales of the row-wise or the column-wise copy.

        Raises:
            PrecisionTypeError: The copy was not made.
        """
        name, codes, scales = "row-wise", self.codes, self.scale_inv
        if columnwise:
            name, codes, scales = "column-wise", self.codes_t, self.scale_inv_t
        if codes is None or scales is None:
            raise PrecisionTypeError(f"Quantised: the {name} copy was not made.")
        return codes, scales

    def get_copy_amax(self, columnwise: bool) -> torch.Tensor:
        """Return the amax of the row-wise or the column-wise copy, (1,) FP32."""
        if columnwise and self.amax_t is not None:
            return self.amax_t
        return self.amax

    def decode_codes(
        self, columnwise: bool = False, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return the values of the codes without scales, (M, K) in FP32 or BF16.

        The axes are the axes of the tensor, not transposed.
        """
        codes, _ = self.get_copy(columnwise)
        if self.spec.format == "e2m1":
            rows, columns = self.get_matrix_shape(columnwise)
            row_length = columns
            if columnwise:  # these codes are transposed
                row_length = rows
            codes = unpack_nibbles(codes, row_length)
        values = decode(codes, self.spec.element, dtype)
        if self.spec.is_transposed(columnwise):
            return values.T
        return values

    def get_tile_scales(self, columnwise: bool = False) -> torch.Tensor:
        """Return the stored scale_inv in FP32, in the axes of the tensor, not transposed.

        Under NVFP4 they are only the scales of the tiles, without the second level, the amax.
        """
        _, stored = self.get_copy(columnwise)
        if self.spec.scale_rule == "e8m0":
            stored = decode_e8m0(stored.to(torch.int32))
        elif self.spec.has_second_level:
            stored = decode(stored, FORMATS["e4m3"])
        if self.spec.is_transposed(columnwise) and not self.spec.has_single_scale:
            return stored.T
        return stored

    def expand_scales(
        self, scales: torch.Tensor, columnwise: bool = False, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return the scale of each element, (M, K).

        Args:
            scales: A scale per tile, in the shape of `get_tile_scales`.
            columnwise: Whether the scales belong to the column-wise copy.
            dtype: Dtype of the result.
        """
        rows, columns = self.get_matrix_shape(columnwise)
        scales = scales.to(dtype)
        if self.spec.has_single_scale:
            return scales.expand(rows, columns)
        height, width = self.get_scale_tile(columnwise)
        return scales.repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :columns]

    def get_scale_tile(self, columnwise: bool) -> Tile:
        """Return the rows and columns that a stored scale covers, in the axes of the tensor.

        A square tile of MXFP8 and NVFP4 stores its scale once for each of its rows.
        """
        height, width = self.spec.tile(columnwise)
        if not self.spec.repeats_square_scales:
            return height, width
        if columnwise:
            return height, 1
        return 1, width

    def dequantise(
        self, dtype: torch.dtype | None = None, *, columnwise: bool = False
    ) -> torch.Tensor:
        """Return code * scale_inv, computed in FP32 and rounded once to `dtype`.

        The result has the shape of the tensor. After a Hadamard transform the column-wise copy is
        the transformed tensor, (M, K) with M padded to a multiple of 16. NaN codes give NaN.

        Args:
            dtype: Dtype of the result. None: the dtype before quantisation.
            columnwise: Whether the column-wise copy is read.

        Source: Transformer Engine 2.20 common/cast/nvfp4/dequantize_nvfp4.cuh (order of NVFP4's
            factors).
        """
        scale_MK = self.expand_scales(self.get_tile_scales(columnwise), columnwise)
        if self.spec.has_second_level:
            amax = self.get_copy_amax(columnwise)
            scale_MK = scale_MK * amax * torch.tensor(1.0 / NVFP4_MAX, dtype=torch.float32)
        result = (self.decode_codes(columnwise) * scale_MK).to(dtype or self.dtype)
        if result.numel() != self.shape.numel():
            return result
        return result.reshape(self.shape)

    def get_matrix_shape(self, columnwise: bool) -> tuple[int, int]:
        """Return rows and columns of a copy, in the axes of the tensor, not transposed."""
        columns = self.shape[-1]
        rows = self.shape[:-1].numel()
        if self.spec.is_transformed(columnwise):
            rows += -rows % HADAMARD_SIZE
        return rows, columns


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Return 4-bit codes packed two to a byte along the last axis.

    The code with the even index is in the low half. A row of odd length ends with a zero.
    """
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first `count` 4-bit codes of each row."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :count]


def pad_scales(quantised: Quantised, *, columnwise: bool = False) -> torch.Tensor:
    """Return the scales as Transformer Engine's GEMMs read them.

    They are padded with zeros, and transposed for tiles of 1x128. Transformer Engine also swizzles
    them for cuBLAS when it calls the GEMM. That is not done here.

    Source: Transformer Engine 2.20 pytorch/csrc/quantizer.cpp:1441-1493 (blockwise), :1852-1881
        (MXFP8); pytorch/tensor/float8_blockwise_tensor.py:162-211.
    """
    _, scales = quantised.get_copy(columnwise)
    spec = quantised.spec
    if spec.has_single_scale:
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
