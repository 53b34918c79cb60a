# ruff: noqa: N803, N806  (shape suffixes are capitals)
"""The C kernel: its calls, and the tensors it takes.

`BRIDGE_NUMERICS` chooses: `auto` (default) uses the C kernel as soon as it is compiled, `native` waits for it and fails
without it, `torch` never uses it. All give the same bits; only the speed differs.
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
_NO_CODE = 256
_SIGNS = (ctypes.c_int32 * BLOCK)(*SIGNS)
_CHOICES = ("auto", "native", "torch")


class _Pass(ctypes.Structure):
    """`pass` of kernel.c."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("x", "out", "scale_inv")],
        *[(name, ctypes.c_int64) for name in ("rows", "columns", "tile_rows", "tile_columns")],
        ("signs", ctypes.c_void_p),
        ("x_rows", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        *[
            (name, ctypes.c_int32)
            for name in ("dtype", "rule", "codes", "stochastic", "power_of_two", "threads")
        ],
        *[
            (name, ctypes.c_int32)
            for name in ("measure", "mantissa_bits", "min_exponent", "bias", "bits")
        ],
        *[(name, ctypes.c_int32) for name in ("nan_code", "nan_bits")],
        *[
            (name, ctypes.c_float)
            for name in ("max", "max_inv", "eps", "on_overflow", "scale", "shift")
        ],
        *[(name, ctypes.c_float) for name in ("amax", "smallest", "largest")],
    )


class _Stored(ctypes.Structure):
    """`stored` of kernel.c."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("codes", "scale_inv", "out")],
        *[(name, ctypes.c_int64) for name in ("rows", "columns", "tile_rows", "tile_columns")],
        *[(name, ctypes.c_int64) for name in ("scale_row", "scale_column")],
        *[(name, ctypes.c_int32) for name in ("rule", "transposed", "packed", "threads")],
        *[(name, ctypes.c_int32) for name in ("mantissa_bits", "bias", "bits", "infinity", "nan")],
        ("shift", ctypes.c_float),
    )


class Kernel:
    """The loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.bridge_amax.restype = ctypes.c_float
        self._library = library

    def takes(self, todo: TilePass) -> bool:
        """Say whether the kernel's panels can hold the tiles of a pass, whose width must be a power of two."""
        width = todo.spec.tile(todo.columnwise)[1]
        return width <= _PANEL and width.bit_count() <= 1

    def amax(self, x_MK: torch.Tensor, *, hadamard: bool) -> float:
        """Return what `backend.amax` describes."""
        x_MK = x_MK.contiguous()
        most: float = self._library.bridge_amax(
            ctypes.byref(_Pass(**_source(x_MK, hadamard=hadamard)))
        )
        return most

    def run(self, x_MK: torch.Tensor, todo: TilePass) -> TileResult:
        """Return what `tiles.run` describes."""
        x_MK = x_MK.contiguous()
        (rows, columns), spec, element = x_MK.shape, todo.spec, todo.spec.element
        rows += -rows % BLOCK if todo.hadamard else 0
        tile, rule = (
            (1, _PANEL) if spec.whole_tensor else spec.tile(todo.columnwise),
            spec.scale_rule,
        )
        values = torch.empty(rows, columns, dtype=torch.uint8 if todo.codes else torch.bfloat16)
        scale_inv = None
        if rule != "given":
            kind = torch.float32 if rule == "fp32" else torch.uint8
            scale_inv = torch.empty(-(-rows // tile[0]), -(-columns // tile[1]), dtype=kind)
        c = _Pass(
            **_source(x_MK, hadamard=todo.hadamard),
            out=values.data_ptr(),
            scale_inv=None if scale_inv is None else scale_inv.data_ptr(),
            rows=rows,
            tile_rows=tile[0],
            tile_columns=tile[1],
            seed=todo.seed or 0,
            rule=_RULES[rule],
            codes=todo.codes,
            stochastic=todo.seed is not None,
            power_of_two=spec.power_of_two_scale,
            measure=todo.measure,
            nan_code=(1 << (element.bits - 1)) - 1 if element.nan is None else element.nan,
            nan_bits=_MAX_BITS if element.nan is None else 0x7FC00000,
            max_inv=1.0 / element.max,
            eps=spec.eps,
            on_overflow=torch.finfo(x_MK.dtype).max,
            scale=todo.scale,
            shift=todo.shift,
            **{
                name: getattr(element, name)
                for name in ("mantissa_bits", "min_exponent", "bias", "bits", "max")
            },
        )
        self._library.bridge_quantise(ctypes.byref(c))
        used = {"smallest": c.smallest, "largest": c.largest} if c.largest > 0 else {}
        return TileResult(values=values, scale_inv=scale_inv, amax=c.amax, **used)

    def decode(self, stored: Quantised, *, columnwise: bool, shift: float) -> torch.Tensor:
        """Return what `backend.decoded` describes."""
        (codes, scales), spec, element = stored.copy(columnwise), stored.spec, stored.spec.element
        codes, transposed = codes.contiguous(), stored.is_transposed(columnwise)
        rows, columns = stored.matrix(columnwise)
        values = torch.empty(rows, columns, dtype=torch.bfloat16)
        tile: Tile = (1, 1) if spec.whole_tensor else stored.scale_tile(columnwise)
        strides: tuple[int, ...] = (0, 0)
        if not spec.whole_tensor:
            strides = scales.stride()[::-1] if transposed else scales.stride()
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
            infinity=_NO_CODE if element.infinity is None else element.infinity,
            nan=_NO_CODE if element.nan is None else (element.infinity or element.nan - 1) + 1,
            shift=shift,
            **{name: getattr(element, name) for name in ("mantissa_bits", "bias", "bits")},
        )
        self._library.bridge_decode(ctypes.byref(c))
        return values

    def lay_out(self, codes: torch.Tensor, *, transposed: bool, packed: bool) -> torch.Tensor:
        """Return what `backend.laid_out` describes."""
        rows, columns = codes.shape[::-1] if transposed else codes.shape
        out = torch.empty(rows, -(-columns // 2) if packed else columns, dtype=torch.uint8)
        sizes = {"rows": rows, "columns": columns, "threads": torch.get_num_threads()}
        c = _Stored(codes=codes.data_ptr(), out=out.data_ptr(), transposed=transposed, **sizes)
        self._library.bridge_lay_out(ctypes.byref(c), packed)
        return out


def _source(x_MK: torch.Tensor, *, hadamard: bool) -> dict[str, Any]:
    """Return the fields of `pass` that say what is read, and by how many threads."""
    return {
        "x": x_MK.data_ptr(),
        "x_rows": x_MK.shape[0],
        "columns": x_MK.shape[1],
        "dtype": _DTYPES[x_MK.dtype],
        "threads": torch.get_num_threads(),
        "signs": ctypes.addressof(_SIGNS) if hadamard else None,
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
            message = f"BRIDGE_NUMERICS: must be auto, native or torch, got {choice!r} (environment). Use one of these."
            raise RunConfigError(message, close_matches(choice, _CHOICES))
        _selection = choice
    return _selection


def use(choice: str) -> str | None:
    """Choose auto, native or torch for this process; return why it cannot be had, None where it can."""
    global _selection  # noqa: PLW0603
    _selection = choice
    return _build.problem if choice == "native" and load(wait=True) is None else None


def kernel_for(x: torch.Tensor) -> Kernel | None:
    """Return the kernel if it is ready and takes this tensor, None where plain torch is to be used."""
    if x.device.type != "cpu" or x.dtype not in (*_DTYPES, torch.uint8) or selection() == "torch":
        return None
    must_wait = selection() == "native"
    kernel = load(wait=must_wait)
    if kernel is None and must_wait:
        raise BackendUnavailableError(
            f"BRIDGE_NUMERICS: the C kernel must be compilable, got 'native' (environment). {_build.problem} Install a "
            "C compiler, or use BRIDGE_NUMERICS=auto."
        )
    return kernel


def load(*, wait: bool) -> Kernel | None:
    """Return the kernel, compiling it first where necessary; None during compilation, or where it is impossible."""
    global _kernel  # noqa: PLW0603  (one library per process)
    if _kernel is None and (library := _build.library(wait=wait)) is not None:
        _kernel = Kernel(library)
    return _kernel
