"""Quantised tensors: TE's quantizers and storages, and `bridge.runtime.numerics`.

    quantizer -> QuantSpec              make_quantizer_spec
    tensor, quantizer -> storage        quantize
    storage -> Quantised                read_quantised
    storage -> operand of a GEMM        make_storage_operand

A storage is a quantised tensor of Transformer Engine: an object with buffers of codes and scales.
The quantizer of a storage states its buffers and their shapes (`inner_tensor_specs`, made for
torch.compile).

Shapes: M rows (the product of all leading axes), K columns.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from bridge.errors import BackendUnavailableError
from bridge.precision.schemes import WHOLE_TENSOR
from bridge.runtime.megatron.te_cpu.enums import DType
from bridge.runtime.numerics import (
    GemmOperand,
    Quantised,
    QuantSpec,
    make_stored_operand,
    pad_scales,
    quantise,
)
from bridge.runtime.numerics.dispatch import lay_out_codes
from bridge.runtime.pytorch.record.operand_format import SCHEME_OF_QUANTIZER, TILE_SIZES, get_tile

TORCH_DTYPES: dict[int, torch.dtype] = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}
QUANTISATION_WATCHERS: list[Callable[[torch.Tensor, Any, Quantised], None]] = []
"""Called with each tensor, its quantizer and the result, for telemetry."""
FORMAT_NAMES: dict[int, str] = {
    DType.kFloat8E4M3: "e4m3",
    DType.kFloat8E5M2: "e5m2",
    DType.kFloat4E2M1: "e2m1",
}


def get_torch_dtype(dtype: Any) -> torch.dtype:
    """Return the torch dtype of an extension's dtype, or a torch dtype as it is."""
    if isinstance(dtype, torch.dtype):
        return dtype
    return TORCH_DTYPES[int(dtype)]


def get_quantizer_name(quantizer: Any) -> str:
    """Return the name of a quantizer's class."""
    return type(quantizer).__name__


def make_quantizer_spec(quantizer: Any) -> QuantSpec:
    """Return the quantisation of a quantizer.

    Raises:
        BackendUnavailableError: The emulation has no such quantisation.
    """
    kind = get_quantizer_name(quantizer)
    scheme = SCHEME_OF_QUANTIZER.get(kind)
    if scheme is None:
        known = ", ".join(SCHEME_OF_QUANTIZER)
        raise BackendUnavailableError(
            f"te_cpu: quantises with {known}, got {kind}. Use another recipe."
        )
    for variant in ("row_scaled_nvfp4", "nvfp4_use_4over6"):
        if getattr(quantizer, variant, False):
            raise BackendUnavailableError(f"te_cpu: has no NVFP4 with {variant}. Leave it off.")
    details: dict[str, Any] = {}
    for field, name in _QUANTIZER_ATTRIBUTES.items():
        if hasattr(quantizer, name):
            details[field] = getattr(quantizer, name)
    if scheme == "mxfp8":
        details["power_of_two_scale"] = True
    row, column = WHOLE_TENSOR, WHOLE_TENSOR
    if scheme in TILE_SIZES:
        row = get_tile(scheme, quantizer, columnwise=False)
        column = get_tile(scheme, quantizer, columnwise=True)
    number_format = FORMAT_NAMES[int(quantizer.dtype)]
    return _make_cached_spec(
        scheme=scheme, format=number_format, rowwise_tile=row, columnwise_tile=column, **details
    )


_make_cached_spec = functools.cache(QuantSpec)
_QUANTIZER_ATTRIBUTES = {
    "power_of_two_scale": "force_pow_2_scales",
    "eps": "amax_epsilon",
    "hadamard": "with_rht",
    "stochastic": "stochastic_rounding",
}
"""Field of a spec -> attribute of the quantizers that have it."""


def _supports_any_gemm_layout() -> bool:
    """Return whether FP8 GEMMs of the declared GPU read row-wise data for every operand.

    On such a GPU no copy is transposed.

    Source: pytorch/utils.py:is_non_tn_fp8_gemm_supported; csrc/quantizer.cpp.
    """
    capability = torch.cuda.get_device_capability()
    return (10, 0) <= capability < (12, 0) or capability >= (13, 0)


_Buffer = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a buffer."""


def _get_buffer_specs(quantizer: Any, shape: tuple[int, ...]) -> dict[str, _Buffer]:
    """Return attribute -> shape and dtype of a quantised tensor's buffers."""
    specs: dict[str, _Buffer] = quantizer.inner_tensor_specs(shape)
    if get_quantizer_name(quantizer) == "NVFP4Quantizer" and "_columnwise_data" in specs:
        # csrc/quantizer.cpp makes a matrix: with two codes a byte a last axis of one sample would
        # have no byte.
        specs["_columnwise_data"] = ((shape[-1], math.prod(shape[:-1]) // 2), torch.uint8)
    return specs


def create_empty_quantized_tensor(
    quantizer: Any, shape: Any, dtype: torch.dtype, *_device_and_pinned: Any
) -> Any:
    """Return a quantised tensor of Transformer Engine's class whose buffers are not filled yet."""
    shape = tuple(shape)
    _require_tiles(quantizer, shape)
    inner = {}
    for name, (size, buffer_dtype) in _get_buffer_specs(quantizer, shape).items():
        inner[name] = torch.empty(size, dtype=buffer_dtype)
    return _assemble_tensor(quantizer, shape, dtype, inner)


def _require_tiles(quantizer: Any, shape: tuple[int, ...]) -> None:
    """Refuse a shape that Transformer Engine does not quantise.

    Raises:
        BackendUnavailableError: MXFP8 of a shape that is not a multiple of 32 on both sides.
    """
    if get_quantizer_name(quantizer) == "MXFP8Quantizer" and (
        shape[-1] % 32 or math.prod(shape[:-1]) % 32
    ):
        # Transformer Engine 2.20 pytorch/csrc/quantizer.cpp, MXFP8Quantizer
        raise BackendUnavailableError(
            "te_cpu: Transformer Engine quantises to MXFP8 what is a multiple of 32 on both sides, "
            f"got a tensor of {shape}. "
            "Use widths and tokens of a micro-batch that are, on each rank."
        )


def _assemble_tensor(
    quantizer: Any, shape: tuple[int, ...], dtype: torch.dtype, inner: dict[str, torch.Tensor]
) -> Any:
    """Return a quantised tensor of Transformer Engine's class with these buffers.

    Args:
        quantizer: Transformer Engine's quantizer.
        shape: Shape of the tensor.
        dtype: Nominal dtype of the tensor.
        inner: Attribute -> buffer.
    """
    meta = quantizer.create_metadata(shape, dtype=dtype)
    stride = None
    if meta["is_tensor"]:
        stride = torch.empty(shape, device="meta").stride()
    tensor = meta["cls"].__tensor_unflatten__(inner, meta, shape, stride)
    if hasattr(tensor, "_with_gemm_swizzled_scales"):
        tensor._with_gemm_swizzled_scales = False  # the GEMMs here read scales as they are
    return tensor


def get_shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a tensor or of a storage."""
    if hasattr(tensor, "shape"):
        return tuple(tensor.shape)
    return tuple(tensor.size())


def _make_amax_reduction(quantizer: Any) -> Callable[[float], float] | None:
    """Return a function for the maximum of an amax over the quantizer's group, None without a group."""
    if not getattr(quantizer, "with_amax_reduction", False):
        return None
    group = quantizer._canonicalized_amax_reduction_group()

    def reduce_over_group(amax: float) -> float:
        value = torch.tensor([amax], dtype=torch.float32)
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX, group=group)
        return value.item()

    return reduce_over_group


def _quantise_buffers(x: torch.Tensor, quantizer: Any) -> dict[str, torch.Tensor | None]:
    """Return the contents of each buffer of the quantised tensor, by Transformer Engine's attribute.

    The amax of delayed scaling is written into the quantizer, and telemetry gets the result.
    """
    spec = make_quantizer_spec(quantizer)
    row, col = quantizer.rowwise_usage, quantizer.columnwise_usage
    if spec.has_single_scale and _supports_any_gemm_layout():
        row, col = True, False
    scale = None
    if spec.scheme == "delayed":
        scale = quantizer.scale
    quantised = quantise(
        x,
        spec,
        rowwise=row,
        columnwise=col,
        tensor_scale=scale,
        reduce_amax=_make_amax_reduction(quantizer),
    )
    if spec.scheme == "delayed" and quantizer.amax.numel():  # the casts of shards give none
        amax = quantised.amax.reshape(quantizer.amax.shape)
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
    for watch in QUANTISATION_WATCHERS:
        watch(x, quantizer, quantised)
    if spec.has_single_scale:
        scale_inv = quantised.scale_inv
        if not row:
            scale_inv = quantised.scale_inv_t
        return {"_data": quantised.codes, "_transpose": quantised.codes_t, "_scale_inv": scale_inv}
    row_scales, column_scales = None, None
    if row:
        row_scales = pad_scales(quantised)
    if col:
        column_scales = pad_scales(quantised, columnwise=True)
    return {
        "_rowwise_data": quantised.codes,
        "_rowwise_scale_inv": row_scales,
        "_columnwise_data": quantised.codes_t,
        "_columnwise_scale_inv": column_scales,
        "_amax_rowwise": quantised.amax,
        "_amax_columnwise": quantised.amax_t,
    }


def quantize(
    tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: torch.Tensor | None = None
) -> Any:
    """Quantise a tensor into a storage of Transformer Engine, and return the storage.

    Args:
        tensor: FP32, BF16 or FP16.
        quantizer: Transformer Engine's quantizer.
        output: Storage to write to; None makes a storage.
        noop: Nothing is written where its first element is not zero.

    Raises:
        RuntimeError: A Hadamard transform of another dtype than BF16.
    """
    if noop is not None and noop.numel() and noop.reshape(-1)[0].item() != 0.0:
        return output
    x = tensor.detach()
    if (
        get_quantizer_name(quantizer) == "NVFP4Quantizer"
        and quantizer.with_rht
        and x.dtype != torch.bfloat16
    ):
        raise RuntimeError("RHT is only supported for bfloat16 input")  # csrc/quantizer.cpp
    if output is None:
        out = _quantise_into_new_tensor(x, quantizer)
    else:
        out = output
        buffers = _get_buffer_specs(quantizer, get_shape(out))
        for name, value in _quantise_buffers(x, quantizer).items():
            if hasattr(out, name):
                _write_buffer(out, name, value, buffers.get(name))
    if hasattr(out, "_transpose_invalid"):
        out._transpose_invalid = out._transpose is None
    if hasattr(out, "_fp8_dtype"):
        out._fp8_dtype = quantizer.dtype
    return out


def _quantise_into_new_tensor(x: torch.Tensor, quantizer: Any) -> Any:
    """Return a tensor in a new storage."""
    shape = tuple(x.shape)
    _require_tiles(quantizer, shape)
    contents = _quantise_buffers(x, quantizer)
    inner = {}
    for name, buffer in _get_buffer_specs(quantizer, shape).items():
        inner[name] = _view_as_buffer(contents.get(name), buffer, f"quantize: {name}")
    return _assemble_tensor(quantizer, shape, x.dtype, inner)


def _view_as_buffer(value: torch.Tensor | None, buffer: _Buffer, label: str) -> torch.Tensor:
    """Return the contents of a buffer in its shape and dtype.

    Raises:
        RuntimeError: There are no contents, or they have another number of elements.
    """
    shape, dtype = buffer
    if value is None or value.numel() != math.prod(shape):
        value_shape = None
        if value is not None:
            value_shape = tuple(value.shape)
        raise RuntimeError(f"{label}: must have shape {shape}, got {value_shape}")
    value = value.reshape(shape)
    if value.dtype == dtype:
        return value
    return value.view(dtype)


def _write_buffer(out: Any, name: str, value: torch.Tensor | None, buffer: _Buffer | None) -> None:
    """Write a buffer of a storage.

    A buffer that has the right shape keeps its memory, which may be a part of a DDP buffer.

    Args:
        out: The storage.
        name: Attribute of the buffer.
        value: Its contents.
        buffer: Its shape and dtype, None if the storage has no such buffer.
    """
    if buffer is None:
        setattr(out, name, None)
        return
    contents = _view_as_buffer(value, buffer, f"{type(out).__name__}.{name}")
    present = getattr(out, name, None)
    if present is not None and present.shape == contents.shape:
        present.copy_(contents)
    else:
        setattr(out, name, contents)


def read_quantised(tensor: Any) -> Quantised:
    """Return the codes and scales of a storage of Transformer Engine, without copying its buffers."""
    spec = make_quantizer_spec(tensor._quantizer)
    shape = torch.Size(get_shape(tensor))
    rows, columns = shape[:-1].numel(), shape[-1]
    if spec.has_single_scale:
        copies = _read_tensor_scaled(tensor, rows, columns)
    else:
        copies = _read_tile_scaled(tensor, spec, rows, columns)
    amax = getattr(tensor, "_amax_rowwise", None)
    if amax is None:
        amax = torch.zeros(1, dtype=torch.float32)
    amax_t = getattr(tensor, "_amax_columnwise", None)
    return Quantised(
        spec=spec, shape=shape, dtype=torch.bfloat16, **copies, amax=amax, amax_t=amax_t
    )


def _read_tensor_scaled(tensor: Any, rows: int, columns: int) -> dict[str, Any]:
    """Return the codes and scales of a storage with a single scale."""
    copies: dict[str, Any] = {"scale_inv": tensor._scale_inv, "scale_inv_t": tensor._scale_inv}
    if tensor._data is not None:
        copies["codes"] = tensor._data.reshape(rows, columns)
    if tensor._transpose is not None and not tensor._transpose_invalid:
        copies["codes_t"] = tensor._transpose.reshape(columns, rows)
    return copies


def _read_tile_scaled(tensor: Any, spec: QuantSpec, rows: int, columns: int) -> dict[str, Any]:
    """Return the codes and scales of a storage with a scale per tile."""
    copies: dict[str, Any] = {}
    if tensor._rowwise_data is not None:
        copies["codes"] = _reshape_to_matrix(tensor._rowwise_data)
        copies["scale_inv"] = _strip_scale_padding(
            tensor._rowwise_scale_inv, spec, rows, columns, columnwise=False
        )
    if tensor._columnwise_data is not None:
        codes_t = tensor._columnwise_data
        if spec.scheme == "mxfp8":
            copies["codes_t"] = _reshape_to_matrix(codes_t)
        else:
            copies["codes_t"] = codes_t.flatten(1)
        copies["scale_inv_t"] = _strip_scale_padding(
            tensor._columnwise_scale_inv, spec, rows, columns, columnwise=True
        )
    return copies


def _reshape_to_matrix(codes: torch.Tensor) -> torch.Tensor:
    """Return codes as (M, K)."""
    return codes.reshape(codes.shape[:-1].numel(), codes.shape[-1])


def _strip_scale_padding(
    scales: torch.Tensor, spec: QuantSpec, rows: int, columns: int, *, columnwise: bool
) -> torch.Tensor:
    """Return scales without Transformer Engine's padding, in the layout of `Quantised`."""
    height, width = spec.tile(columnwise)
    if spec.scheme != "blockwise":  # each row of a square tile has its scale
        size = max(height, width)
        height, width = 1, size
        if columnwise:
            height, width = size, 1
    tiles_down = -(-rows // height)
    tiles_across = -(-columns // width)
    if spec.scheme == "blockwise" and height != width:
        # the axis of tiles is the first: (K/128, M) row-wise, (M/128, K) column-wise
        if columnwise:
            return scales[:tiles_down, :tiles_across].T
        return scales[:tiles_across, :tiles_down].T
    if columnwise and spec.scheme != "mxfp8":  # in the axes of the transposed tensor
        return scales[:tiles_across, :tiles_down]
    return scales[:tiles_down, :tiles_across]


def make_storage_operand(tensor: Any, role: str, *, columnwise: bool) -> GemmOperand:
    """Return the row-wise or column-wise copy of a storage as the operand of a GEMM.

    Raises:
        RuntimeError: The storage does not have the copy.
    """
    stored = read_quantised(tensor)
    if stored.spec.has_single_scale:
        if not columnwise and stored.codes is None:
            raise RuntimeError(
                f"GEMM: needs the row-wise data of {type(tensor).__name__}, "
                "which holds the transpose alone"
            )
        if columnwise and stored.codes_t is None and not _supports_any_gemm_layout():
            raise RuntimeError(
                f"GEMM: needs the transpose of {type(tensor).__name__}, "
                "which is not held or out of date"
            )
    return make_stored_operand(stored, role, columnwise=columnwise)


def dequantize(tensor: Any, dtype: Any) -> torch.Tensor:
    """Return the values of a storage, from its row-wise copy if it has one."""
    stored = read_quantised(tensor)
    values = stored.dequantise(get_torch_dtype(dtype), columnwise=stored.codes is None)
    return values.reshape(get_shape(tensor))


def bgrad_quantize(tensor: torch.Tensor, quantizer: Any) -> list[Any]:
    """Return the gradient of a bias, and the gradient of the output quantised."""
    summed = tensor.reshape(-1, tensor.shape[-1]).float().sum(0).to(tensor.dtype)
    if quantizer is None:
        return [summed, tensor]
    return [summed, quantize(tensor, quantizer)]


def split_quantize(
    tensor: torch.Tensor, sections: list[int], quantizers: list[Any], **_allocation: Any
) -> list[Any]:
    """Return the parts of a tensor, each quantised by the quantizer at its position."""
    quantised = []
    for part, quantizer in zip(torch.split(tensor, sections), quantizers, strict=True):
        quantised.append(quantize(part, quantizer))
    return quantised


def fp8_transpose(
    codes: torch.Tensor, _dtype: Any, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return transposed codes: the last axis is the first, and the other axes keep their order."""
    matrix = lay_out_codes(_reshape_to_matrix(codes).contiguous(), transposed=True, packed=False)
    transposed = matrix.reshape(codes.shape[-1], *codes.shape[:-1])
    if out is None:
        return transposed
    return out.copy_(transposed)
