# ruff: noqa: N803, N806  (shape suffixes are capitals)
"""The C kernel: its calls, and the tensors it takes.

`BRIDGE_NUMERICS` chooses: `auto` (default) uses the C kernel as soon as it is compiled, `native`
waits for it and fails without it, `torch` never uses it. All give the same bits; only the speed
differs.
"""

import ctypes
import os
import struct
from typing import Any

import torch

from bridge.errors import BackendUnavailableError, RunConfigError, close_matches
from bridge.precision.formats import FORMATS
from bridge.precision.schemes import Tile
from bridge.runtime.numerics.build import Build
from bridge.runtime.numerics.hadamard import BLOCK, SIGNS
from bridge.runtime.numerics.quantised import Quantised
from bridge.runtime.numerics.tiles import TilePass, TileResult

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_RULES = {"given": 0, "fp32": 1, "e8m0": 2, "nvfp4": 3}
_PANEL = 1024
_MAX_BITS = struct.unpack("<I", struct.pack("<f", FORMATS["e2m1"].max))[0]
_NAN_BITS = 0x7FC00000
_NO_CODE = 256
_SIGNS = (ctypes.c_int32 * BLOCK)(*SIGNS)
_CHOICES = ("auto", "native", "torch")


def _of_type(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Return the fields of a C structure that are of one type, in the order of their names."""
    return [(name, kind) for name in names.split()]


class _Pass(ctypes.Structure):
    """`pass` of kernel.c."""

    _fields_ = (
        *_of_type(ctypes.c_void_p, "x out scale_inv"),
        *_of_type(ctypes.c_int64, "rows columns tile_rows tile_columns"),
        *_of_type(ctypes.c_void_p, "signs"),
        *_of_type(ctypes.c_int64, "x_rows"),
        *_of_type(ctypes.c_uint64, "seed"),
        *_of_type(ctypes.c_int32, "dtype rule codes stochastic power_of_two threads"),
        *_of_type(ctypes.c_int32, "measure mantissa_bits min_exponent bias bits"),
        *_of_type(ctypes.c_int32, "nan_code nan_bits"),
        *_of_type(ctypes.c_float, "max max_inv eps on_overflow scale shift"),
        *_of_type(ctypes.c_float, "amax smallest largest"),
    )


class _Stored(ctypes.Structure):
    """`stored` of kernel.c."""

    _fields_ = (
        *_of_type(ctypes.c_void_p, "codes scale_inv out"),
        *_of_type(ctypes.c_int64, "rows columns tile_rows tile_columns"),
        *_of_type(ctypes.c_int64, "scale_row scale_column"),
        *_of_type(ctypes.c_int32, "rule transposed packed threads"),
        *_of_type(ctypes.c_int32, "mantissa_bits bias bits infinity nan"),
        *_of_type(ctypes.c_float, "shift"),
    )


class Kernel:
    """The loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.bridge_amax.restype = ctypes.c_float
        self._library = library

    def takes(self, todo: TilePass) -> bool:
        """Return whether the kernel's panels can hold the tiles of a pass.

        The width of a tile must be a power of two.
        """
        width = todo.spec.tile(todo.columnwise)[1]
        return width <= _PANEL and width.bit_count() <= 1

    def amax(self, x_MK: torch.Tensor, *, hadamard: bool) -> float:
        """Return what `backend.amax` describes."""
        x_MK = x_MK.contiguous()
        source = _Pass(**_source(x_MK, hadamard=hadamard))
        most: float = self._library.bridge_amax(ctypes.byref(source))
        return most

    def run(self, x_MK: torch.Tensor, todo: TilePass) -> TileResult:
        """Return what `tiles.run` describes."""
        x_MK = x_MK.contiguous()
        spec, element, rule = todo.spec, todo.spec.element, todo.spec.scale_rule
        rows, columns = x_MK.shape
        if todo.hadamard:
            rows += -rows % BLOCK
        height, width = spec.tile(todo.columnwise)
        if spec.whole_tensor:
            height, width = 1, _PANEL
        kind = torch.uint8 if todo.codes else torch.bfloat16
        values = torch.empty(rows, columns, dtype=kind)
        scale_inv = None
        scale_pointer = None
        if rule != "given":
            scale_kind = torch.float32 if rule == "fp32" else torch.uint8
            tiles = -(-rows // height), -(-columns // width)
            scale_inv = torch.empty(*tiles, dtype=scale_kind)
            scale_pointer = scale_inv.data_ptr()
        nan_code, nan_bits = element.nan, _NAN_BITS
        if nan_code is None:  # the largest value stands for NaN
            nan_code, nan_bits = (1 << (element.bits - 1)) - 1, _MAX_BITS
        c = _Pass(
            **_source(x_MK, hadamard=todo.hadamard),
            out=values.data_ptr(),
            scale_inv=scale_pointer,
            rows=rows,
            tile_rows=height,
            tile_columns=width,
            seed=todo.seed or 0,
            rule=_RULES[rule],
            codes=todo.codes,
            stochastic=todo.seed is not None,
            power_of_two=spec.power_of_two_scale,
            measure=todo.measure,
            mantissa_bits=element.mantissa_bits,
            min_exponent=element.min_exponent,
            bias=element.bias,
            bits=element.bits,
            nan_code=nan_code,
            nan_bits=nan_bits,
            max=element.max,
            max_inv=1.0 / element.max,
            eps=spec.eps,
            on_overflow=torch.finfo(x_MK.dtype).max,
            scale=todo.scale,
            shift=todo.shift,
        )
        self._library.bridge_quantise(ctypes.byref(c))
        smallest = largest = 1.0
        if c.largest > 0:
            smallest, largest = c.smallest, c.largest
        return TileResult(
            values=values, scale_inv=scale_inv, amax=c.amax, smallest=smallest, largest=largest
        )

    def decode(self, stored: Quantised, *, columnwise: bool, shift: float) -> torch.Tensor:
        """Return what `backend.decoded` describes."""
        spec, element = stored.spec, stored.spec.element
        codes, scales = stored.copy(columnwise)
        codes, transposed = codes.contiguous(), stored.is_transposed(columnwise)
        rows, columns = stored.matrix(columnwise)
        values = torch.empty(rows, columns, dtype=torch.bfloat16)
        tile: Tile = (1, 1)
        strides: tuple[int, ...] = (0, 0)
        if not spec.whole_tensor:
            tile, strides = stored.scale_tile(columnwise), scales.stride()
            if transposed:
                strides = strides[::-1]
        infinity = _NO_CODE if element.infinity is None else element.infinity
        nan = _NO_CODE  # the smallest code of NaN
        if element.nan is not None:
            nan = element.nan
            if element.infinity:
                nan = element.infinity + 1
        c = _Stored(
            codes=codes.data_ptr(),
            scale_inv=scales.data_ptr(),
            out=values.data_ptr(),
            rows=rows,
            columns=columns,
            tile_rows=tile[0],
            tile_columns=tile[1],
            scale_row=strides[0],
            scale_column=strides[1],
            rule=_RULES[spec.scale_rule],
            transposed=transposed,
            packed=spec.format == "e2m1",
            threads=torch.get_num_threads(),
            mantissa_bits=element.mantissa_bits,
            bias=element.bias,
            bits=element.bits,
            infinity=infinity,
            nan=nan,
            shift=shift,
        )
        self._library.bridge_decode(ctypes.byref(c))
        return values

    def lay_out(self, codes: torch.Tensor, *, transposed: bool, packed: bool) -> torch.Tensor:
        """Return what `backend.laid_out` describes."""
        rows, columns = codes.shape
        if transposed:
            rows, columns = columns, rows
        width = columns
        if packed:
            width = -(-columns // 2)
        out = torch.empty(rows, width, dtype=torch.uint8)
        c = _Stored(
            codes=codes.data_ptr(),
            out=out.data_ptr(),
            rows=rows,
            columns=columns,
            transposed=transposed,
            threads=torch.get_num_threads(),
        )
        self._library.bridge_lay_out(ctypes.byref(c), packed)
        return out


def _source(x_MK: torch.Tensor, *, hadamard: bool) -> dict[str, Any]:
    """Return the fields of `pass` that say what is read, and by how many threads."""
    signs = None
    if hadamard:
        signs = ctypes.addressof(_SIGNS)
    return {
        "x": x_MK.data_ptr(),
        "x_rows": x_MK.shape[0],
        "columns": x_MK.shape[1],
        "dtype": _DTYPES[x_MK.dtype],
        "threads": torch.get_num_threads(),
        "signs": signs,
    }


_build = Build()
_kernel: Kernel | None = None
_selection: str | None = None


def selection() -> str:
    """Return the choice in force, auto, native or torch; reads `BRIDGE_NUMERICS` the first time."""
    global _selection  # noqa: PLW0603  (one choice per process)
    if _selection is None:
        choice = os.environ.get("BRIDGE_NUMERICS", "auto")
        if choice not in _CHOICES:
            message = (
                f"BRIDGE_NUMERICS: must be auto, native or torch, got {choice!r} (environment). "
                "Use one of these."
            )
            raise RunConfigError(message, close_matches(choice, _CHOICES))
        _selection = choice
    return _selection


def use(choice: str) -> str | None:
    """Choose auto, native or torch for this process.

    Return why it cannot be had, None where it can.
    """
    global _selection  # noqa: PLW0603
    _selection = choice
    if choice == "native" and load(wait=True) is None:
        return _build.problem
    return None


def kernel_for(x: torch.Tensor) -> Kernel | None:
    """Return the kernel if it is ready and takes this tensor, None where plain torch is used."""
    if x.device.type != "cpu" or x.dtype not in (*_DTYPES, torch.uint8) or selection() == "torch":
        return None
    must_wait = selection() == "native"
    kernel = load(wait=must_wait)
    if kernel is None and must_wait:
        raise BackendUnavailableError(
            "BRIDGE_NUMERICS: the C kernel must be compilable, got 'native' (environment). "
            f"{_build.problem} Install a C compiler, or use BRIDGE_NUMERICS=auto."
        )
    return kernel


def load(*, wait: bool) -> Kernel | None:
    """Return the kernel, compiling it first where necessary.

    None: it is still compiled, or it cannot be.
    """
    global _kernel  # noqa: PLW0603  (one library per process)
    if _kernel is None:
        library = _build.library(wait=wait)
        if library is not None:
            _kernel = Kernel(library)
    return _kernel
