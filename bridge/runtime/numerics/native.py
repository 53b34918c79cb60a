# ruff: noqa: N803, N806  (shape suffixes are capitals)
"""The C kernel: its calls, and the choice between it and plain torch.

`BRIDGE_NUMERICS` is `auto` (the default: the C kernel as soon as it is compiled), `native` (wait for
the kernel, and fail without it) or `torch` (never the kernel). The bits are the same under all
three; only the speed differs.
"""

import ctypes
import os
import struct
from typing import Any, NamedTuple

import torch

from bridge.errors import BackendUnavailableError, RunConfigError, close_matches
from bridge.precision.formats import Format
from bridge.precision.schemes import Tile
from bridge.runtime.numerics.hadamard import HADAMARD_SIGNS, HADAMARD_SIZE
from bridge.runtime.numerics.kernel_build import KernelBuild
from bridge.runtime.numerics.quantised import Quantised
from bridge.runtime.numerics.spec import QuantSpec
from bridge.runtime.numerics.tiles import TilePass, TileResult

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtype of x -> its number in kernel.c."""
_SCALE_RULE_CODES = {"tensor": 0, "fp32": 1, "e8m0": 2, "nvfp4": 3}
"""`QuantSpec.scale_rule` -> its number in kernel.c."""
_PANEL_COLUMNS = 1024
"""Columns that kernel.c works on at a time."""
_BF16_NAN_AS_FP32 = 0x7FC00000
"""Bits of the NaN that operand values get."""
_NO_CODE = 256
"""Stands for a code that a format does not have; it is above all codes."""
_SIGNS_ARRAY = (ctypes.c_int32 * HADAMARD_SIZE)(*HADAMARD_SIGNS)
_KERNEL_CHOICES = ("auto", "native", "torch")


def _make_fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Return the fields of a C structure that have the same type, in the order of their names.

    Python and C know a field by its position alone: an edit of a structure here is an edit in
    kernel.c.
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
        *_make_fields(ctypes.c_float, "max max_inv eps on_overflow scale shift"),
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
        *_make_fields(ctypes.c_float, "shift"),
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

        The width of a tile must be a power of two.
        """
        width = tile_pass.spec.tile(tile_pass.columnwise)[1]
        return width <= _PANEL_COLUMNS and width.bit_count() <= 1

    def amax(self, x_MK: torch.Tensor, *, hadamard: bool) -> float:
        """Return the largest magnitude of a matrix, as `dispatch.amax` does."""
        x_MK = x_MK.contiguous()
        source = _PassArguments(**_get_source_arguments(x_MK, hadamard=hadamard))
        amax: float = self._library.bridge_amax(ctypes.byref(source))
        return amax

    def run(self, x_MK: torch.Tensor, tile_pass: TilePass) -> TileResult:
        """Run a quantisation pass over a matrix, as `tiles.run` does."""
        x_MK = x_MK.contiguous()
        spec = tile_pass.spec
        rows, columns = x_MK.shape
        if tile_pass.hadamard:
            rows += -rows % HADAMARD_SIZE
        tile = spec.tile(tile_pass.columnwise)
        if spec.has_single_scale:
            tile = (1, _PANEL_COLUMNS)
        values = torch.empty(rows, columns, dtype=tile_pass.result_dtype)
        scale_inv = _allocate_scales(spec, tile, rows, columns)
        scale_pointer = None
        if scale_inv is not None:
            scale_pointer = scale_inv.data_ptr()
        arguments = _PassArguments(
            **_get_source_arguments(x_MK, hadamard=tile_pass.hadamard),
            **_get_format_arguments(spec.element),
            out=values.data_ptr(),
            scale_inv=scale_pointer,
            rows=rows,
            tile_rows=tile[0],
            tile_columns=tile[1],
            seed=tile_pass.seed or 0,
            rule=_SCALE_RULE_CODES[spec.scale_rule],
            codes=tile_pass.codes,
            stochastic=tile_pass.seed is not None,
            power_of_two=spec.power_of_two_scale,
            measure=tile_pass.measure,
            eps=spec.eps,
            on_overflow=torch.finfo(x_MK.dtype).max,
            scale=tile_pass.scale,
            shift=tile_pass.shift,
        )
        self._library.bridge_quantise(ctypes.byref(arguments))
        smallest = largest = 1.0
        if arguments.largest > 0:
            smallest, largest = arguments.smallest, arguments.largest
        return TileResult(
            values=values,
            scale_inv=scale_inv,
            amax=arguments.amax,
            smallest=smallest,
            largest=largest,
        )

    def decode(self, stored: Quantised, *, columnwise: bool, shift: float) -> torch.Tensor:
        """Return the values of a stored copy in BF16, as `dispatch.decoded` does."""
        spec = stored.spec
        codes, scales = stored.copy(columnwise)
        codes = codes.contiguous()
        transposed = stored.is_transposed(columnwise)
        rows, columns = stored.matrix(columnwise)
        values = torch.empty(rows, columns, dtype=torch.bfloat16)
        tile: Tile = (1, 1)
        scale_strides: tuple[int, ...] = (0, 0)
        if not spec.has_single_scale:
            tile = stored.scale_tile(columnwise)
            scale_strides = scales.stride()
            if transposed:
                scale_strides = scale_strides[::-1]
        arguments = _StoredArguments(
            **_get_special_codes(spec.element),
            codes=codes.data_ptr(),
            scale_inv=scales.data_ptr(),
            out=values.data_ptr(),
            rows=rows,
            columns=columns,
            tile_rows=tile[0],
            tile_columns=tile[1],
            scale_row=scale_strides[0],
            scale_column=scale_strides[1],
            rule=_SCALE_RULE_CODES[spec.scale_rule],
            transposed=transposed,
            packed=spec.format == "e2m1",
            threads=torch.get_num_threads(),
            mantissa_bits=spec.element.mantissa_bits,
            bias=spec.element.bias,
            bits=spec.element.bits,
            shift=shift,
        )
        self._library.bridge_decode(ctypes.byref(arguments))
        return values

    def lay_out(self, codes: torch.Tensor, *, transposed: bool, packed: bool) -> torch.Tensor:
        """Return codes as they are stored, as `dispatch.laid_out` does."""
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


def _allocate_scales(spec: QuantSpec, tile: Tile, rows: int, columns: int) -> torch.Tensor | None:
    """Return an uninitialised scale per tile, None where the whole tensor has a single scale."""
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
    if nan_code is None:  # the largest value stands for NaN
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


class _Selection(NamedTuple):
    """The choice of a process, and where it was made."""

    choice: str
    """auto, native or torch."""
    setting: str
    origin: str
    remedy: str
    """How `auto` is chosen instead."""


_build = KernelBuild()
_kernel: Kernel | None = None
_selection: _Selection | None = None
"""The choice of this process, None before the first call."""


def get_kernel_choice() -> str:
    """Return the choice of this process: auto, native or torch.

    The first call reads `BRIDGE_NUMERICS`.

    Raises:
        RunConfigError: The variable has another value.
    """
    global _selection  # noqa: PLW0603  (one choice per process)
    if _selection is None:
        choice = os.environ.get("BRIDGE_NUMERICS", "auto")
        if choice not in _KERNEL_CHOICES:
            message = (
                f"BRIDGE_NUMERICS: must be auto, native or torch, got {choice!r} (environment). "
                "Use one of these."
            )
            raise RunConfigError(message, close_matches(choice, _KERNEL_CHOICES))
        _selection = _Selection(
            choice=choice,
            setting="BRIDGE_NUMERICS",
            origin="environment",
            remedy="use BRIDGE_NUMERICS=auto",
        )
    return _selection.choice


def use(choice: str) -> str | None:
    """Choose auto, native or torch for this process.

    Returns:
        Why the C kernel cannot be compiled, as a sentence; None where the choice can be used.
    """
    global _selection  # noqa: PLW0603
    _selection = _Selection(
        choice=choice, setting="use", origin="call of use", remedy='call use("auto")'
    )
    if choice == "native" and load_kernel(wait=True) is None:
        return _build.problem
    return None


def get_kernel(x: torch.Tensor) -> Kernel | None:
    """Return the kernel for a tensor, None where plain torch is used.

    Plain torch is used on other devices and dtypes, under the choice `torch`, and until the kernel
    is compiled.

    Raises:
        BackendUnavailableError: The choice is `native`, and the kernel cannot be compiled.
    """
    if (
        x.device.type != "cpu"
        or x.dtype not in (*_DTYPE_CODES, torch.uint8)
        or get_kernel_choice() == "torch"
    ):
        return None
    must_wait = get_kernel_choice() == "native"
    kernel = load_kernel(wait=must_wait)
    if kernel is None and must_wait and _selection is not None:
        raise BackendUnavailableError(
            f"{_selection.setting}: the C kernel must be compilable, got 'native' "
            f"({_selection.origin}). {_build.problem} "
            f"Install a C compiler, or {_selection.remedy}."
        )
    return kernel


def load_kernel(*, wait: bool) -> Kernel | None:
    """Return the kernel, and start its compilation where there is none.

    The result is None where the kernel cannot be compiled and, without `wait`, while it is compiled.
    """
    global _kernel  # noqa: PLW0603  (one library per process)
    if _kernel is None:
        library = _build.library(wait=wait)
        if library is not None:
            _kernel = Kernel(library)
    return _kernel
