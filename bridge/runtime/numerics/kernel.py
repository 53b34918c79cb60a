# ruff: noqa: N803, N806  (shape suffixes are capitals)
"""`Kernel`: the functions of kernel.c, called through ctypes.

Each method fills a structure of kernel.c with pointers, sizes and rules, and calls a function that
reads it. native.py decides when the kernel is used.
"""

import ctypes
import math
import struct
from typing import Any

import torch

from bridge.precision.formats import Format
from bridge.precision.schemes import Tile
from bridge.runtime.numerics.hadamard import HADAMARD_SIGNS, HADAMARD_SIZE
from bridge.runtime.numerics.quantised import Quantised
from bridge.runtime.numerics.spec import QuantSpec
from bridge.runtime.numerics.tiles import ScaleRange, TilePass, TileResult

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtype of a matrix -> its number in kernel.c."""
KERNEL_DTYPES = (*_DTYPE_CODES, torch.uint8)
"""Dtypes of tensors that the kernel reads: matrices, and codes."""
_SCALE_RULE_CODES = {"tensor": 0, "fp32": 1, "e8m0": 2, "nvfp4": 3}
"""`QuantSpec.scale_rule` -> its number in kernel.c."""
_PANEL_COLUMNS = 1024
"""Columns that kernel.c works on at a time."""
_BF16_NAN_AS_FP32 = 0x7FC00000
"""Bits of the NaN that operand values get."""
_NO_CODE = 256
"""The number for a code that a format does not have. It is above all codes."""
_SIGNS_ARRAY = (ctypes.c_int32 * HADAMARD_SIZE)(*HADAMARD_SIGNS)


def _make_fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Return the fields of a C structure that have the same type, in the order of their names.

    Python and C identify a field only by its position. So every edit of a structure here needs the
    same edit in kernel.c.
    """
    return [(name, kind) for name in names.split()]


class _PassArguments(ctypes.Structure):
    """The structure `pass` of kernel.c: arguments and results of a quantisation pass."""

    _fields_ = (
        *_make_fields(ctypes.c_void_p, "x out scale_inv"),
        *_make_fields(ctypes.c_int64, "rows columns tile_rows tile_columns"),
        *_make_fields(ctypes.c_void_p, "signs"),
        *_make_fields(ctypes.c_int64, "x_rows"),
        *_make_fields(ctypes.c_uint64, "seed"),
        *_make_fields(ctypes.c_int32, "dtype rule codes stochastic power_of_two threads"),
        *_make_fields(ctypes.c_int32, "measure mantissa_bits min_exponent bias bits"),
        *_make_fields(ctypes.c_int32, "nan_code nan_bits"),
        *_make_fields(ctypes.c_float, "max max_inv eps on_overflow scale range_multiplier"),
        *_make_fields(ctypes.c_float, "amax smallest largest"),
    )


class _StoredArguments(ctypes.Structure):
    """The structure `stored` of kernel.c: codes and scales that are read or laid out."""

    _fields_ = (
        *_make_fields(ctypes.c_void_p, "codes scale_inv out"),
        *_make_fields(ctypes.c_int64, "rows columns tile_rows tile_columns"),
        *_make_fields(ctypes.c_int64, "scale_row scale_column"),
        *_make_fields(ctypes.c_int32, "rule transposed packed threads"),
        *_make_fields(ctypes.c_int32, "mantissa_bits bias bits infinity nan"),
        *_make_fields(ctypes.c_float, "range_multiplier"),
    )


class Kernel:
    """The functions of the loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Prepare the functions, and compare the sizes of the structures with those in C."""
        sizes = (
            ("pass", library.bridge_pass_bytes, _PassArguments),
            ("stored", library.bridge_stored_bytes, _StoredArguments),
        )
        for name, bytes_in_c, structure in sizes:
            bytes_in_c.restype = ctypes.c_int64
            if bytes_in_c() != ctypes.sizeof(structure):  # a call would write past its end
                raise AssertionError(
                    f"the structure {name} of kernel.c and {structure.__name__} differ in size"
                )
        library.bridge_amax.restype = ctypes.c_float
        self._library = library

    def can_run(self, tile_pass: TilePass) -> bool:
        """Return whether the kernel's panels can hold the tiles of a pass.

        The width of a tile must be a power of two. A tile of a transformed matrix must be a column
        of one group of rows. A scale of the whole tensor must be positive and finite, since the
        kernel takes the sign and the NaN of a result from the element alone.
        """
        height, width = tile_pass.spec.tile(tile_pass.columnwise)
        if tile_pass.has_transform and (height, width) != (HADAMARD_SIZE, 1):
            return False
        if not 0.0 < tile_pass.tensor_scale < math.inf:
            return False
        return width <= _PANEL_COLUMNS and width.bit_count() <= 1

    def compute_amax(self, x_MK: torch.Tensor, *, hadamard: bool) -> float:
        """Return the largest magnitude of a matrix, as `dispatch.compute_amax` does."""
        x_MK = x_MK.contiguous()
        source = _PassArguments(**_get_source_arguments(x_MK, hadamard=hadamard))
        amax: float = self._library.bridge_amax(ctypes.byref(source))
        return amax

    def run(self, x_MK: torch.Tensor, tile_pass: TilePass) -> TileResult:
        """Run a quantisation pass over a matrix, as `tiles.run_torch_pass` does.

        Args:
            x_MK: FP32, BF16 or FP16 on the CPU. The kernel transforms it if the pass needs that.
            tile_pass: Parameters of the pass.
        """
        x_MK = x_MK.contiguous()
        spec = tile_pass.spec
        rows, columns = x_MK.shape
        if tile_pass.has_transform:
            rows += -rows % HADAMARD_SIZE
        tile = spec.tile(tile_pass.columnwise)
        if spec.has_single_scale:  # any tiles can be used, because all have the scale of the tensor
            tile = (1, _PANEL_COLUMNS)
        values = torch.empty(rows, columns, dtype=tile_pass.result_dtype)
        scale_inv = _allocate_scales(spec, tile, rows, columns)
        arguments = _make_pass_arguments(x_MK, tile_pass, tile, values, scale_inv)
        self._library.bridge_quantise(ctypes.byref(arguments))
        scale_range = None
        if arguments.largest > 0:
            scale_range = ScaleRange(arguments.smallest, arguments.largest)
        return TileResult(
            values=values, scale_inv=scale_inv, amax=arguments.amax, scale_range=scale_range
        )

    def decode(
        self, stored: Quantised, *, columnwise: bool, range_multiplier: float
    ) -> torch.Tensor:
        """Return the values of a stored copy in BF16, as `dispatch.decode_stored` does."""
        codes, scales = stored.get_copy(columnwise)
        codes = codes.contiguous()
        rows, columns = stored.get_matrix_shape(columnwise)
        values = torch.empty(rows, columns, dtype=torch.bfloat16)
        element = stored.spec.element
        arguments = _StoredArguments(
            **_get_special_codes(element),
            **_get_scale_arguments(stored, scales, columnwise=columnwise),
            codes=codes.data_ptr(),
            out=values.data_ptr(),
            rows=rows,
            columns=columns,
            transposed=stored.spec.is_transposed(columnwise),
            packed=stored.spec.format == "e2m1",
            threads=torch.get_num_threads(),
            mantissa_bits=element.mantissa_bits,
            bias=element.bias,
            bits=element.bits,
            range_multiplier=range_multiplier,
        )
        self._library.bridge_decode(ctypes.byref(arguments))
        return values

    def lay_out(self, codes: torch.Tensor, *, transposed: bool, packed: bool) -> torch.Tensor:
        """Return codes as they are stored, as `dispatch.lay_out_codes` does."""
        rows, columns = codes.shape
        if transposed:
            rows, columns = columns, rows
        width = columns
        if packed:
            width = -(-columns // 2)
        out = torch.empty(rows, width, dtype=torch.uint8)
        arguments = _StoredArguments(
            codes=codes.data_ptr(),
            out=out.data_ptr(),
            rows=rows,
            columns=columns,
            transposed=transposed,
            threads=torch.get_num_threads(),
        )
        self._library.bridge_lay_out(ctypes.byref(arguments), packed)
        return out


def _make_pass_arguments(
    x_MK: torch.Tensor,
    tile_pass: TilePass,
    tile: Tile,
    values: torch.Tensor,
    scale_inv: torch.Tensor | None,
) -> _PassArguments:
    """Return the arguments of a quantisation pass.

    Args:
        x_MK: The matrix that is read.
        tile_pass: Parameters of the pass.
        tile: Rows and columns of a tile.
        values: Codes or operand values, to be written.
        scale_inv: Dequantisation scales of the tiles, to be written. None: the tensor has a single
            scale.
    """
    scale_pointer = None
    if scale_inv is not None:
        scale_pointer = scale_inv.data_ptr()
    spec = tile_pass.spec
    return _PassArguments(
        **_get_source_arguments(x_MK, hadamard=tile_pass.has_transform),
        **_get_format_arguments(spec.element),
        out=values.data_ptr(),
        scale_inv=scale_pointer,
        rows=values.shape[0],
        tile_rows=tile[0],
        tile_columns=tile[1],
        seed=tile_pass.seed or 0,
        rule=_SCALE_RULE_CODES[spec.scale_rule],
        codes=tile_pass.makes_codes,
        stochastic=tile_pass.seed is not None,
        power_of_two=spec.power_of_two_scale,
        measure=tile_pass.measures_amax,
        eps=spec.eps,
        on_overflow=torch.finfo(x_MK.dtype).max,
        scale=tile_pass.tensor_scale,
        range_multiplier=tile_pass.range_multiplier,
    )


def _allocate_scales(spec: QuantSpec, tile: Tile, rows: int, columns: int) -> torch.Tensor | None:
    """Return an uninitialised scale per tile, or None if the whole tensor has a single scale."""
    if spec.scale_rule == "tensor":
        return None
    dtype = torch.uint8
    if spec.scale_rule == "fp32":
        dtype = torch.float32
    height, width = tile
    return torch.empty(-(-rows // height), -(-columns // width), dtype=dtype)


def _get_format_arguments(element: Format) -> dict[str, Any]:
    """Return the fields of `pass` about the element format."""
    nan_code, nan_bits = element.nan, _BF16_NAN_AS_FP32
    if nan_code is None:  # NaN becomes the largest value
        nan_code = (1 << (element.bits - 1)) - 1
        nan_bits = struct.unpack("<I", struct.pack("<f", element.max))[0]
    return {
        "mantissa_bits": element.mantissa_bits,
        "min_exponent": element.min_exponent,
        "bias": element.bias,
        "bits": element.bits,
        "nan_code": nan_code,
        "nan_bits": nan_bits,
        "max": element.max,
        "max_inv": 1.0 / element.max,
    }


def _get_special_codes(element: Format) -> dict[str, int]:
    """Return the code of infinity and the smallest code of NaN of a format."""
    infinity = nan = _NO_CODE
    if element.infinity is not None:
        infinity = element.infinity
    if element.infinity:
        nan = element.infinity + 1
    elif element.nan is not None:
        nan = element.nan
    return {"infinity": infinity, "nan": nan}


def _get_source_arguments(x_MK: torch.Tensor, *, hadamard: bool) -> dict[str, Any]:
    """Return the fields of `pass` about the matrix that is read, and the number of threads."""
    signs = None
    if hadamard:
        signs = ctypes.addressof(_SIGNS_ARRAY)
    return {
        "x": x_MK.data_ptr(),
        "x_rows": x_MK.shape[0],
        "columns": x_MK.shape[1],
        "dtype": _DTYPE_CODES[x_MK.dtype],
        "threads": torch.get_num_threads(),
        "signs": signs,
    }


def _get_scale_arguments(
    stored: Quantised, scales: torch.Tensor, *, columnwise: bool
) -> dict[str, Any]:
    """Return the fields of `stored` about the scales of a copy.

    A scale of the whole tensor is not read, because it is applied to the result of the GEMM.
    """
    arguments = {
        "rule": _SCALE_RULE_CODES[stored.spec.scale_rule],
        "scale_inv": scales.data_ptr(),
        "tile_rows": 1,
        "tile_columns": 1,
        "scale_row": 0,
        "scale_column": 0,
    }
    if not stored.spec.has_single_scale:
        scale_row, scale_column = scales.stride()
        if stored.spec.is_transposed(columnwise):
            scale_row, scale_column = scale_column, scale_row
        tile_rows, tile_columns = stored.get_scale_tile(columnwise)
        arguments["tile_rows"], arguments["tile_columns"] = tile_rows, tile_columns
        arguments["scale_row"], arguments["scale_column"] = scale_row, scale_column
    return arguments
