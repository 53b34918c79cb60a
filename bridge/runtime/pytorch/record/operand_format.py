"""`get_operand_format`: number format, scaling scheme and tile of an operand, from its tensor.

An operand is a plain tensor, a storage of Transformer Engine, or an emulated stored weight.
Nothing of Transformer Engine is imported: its classes are recognised by their names.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch

from bridge.precision.coercion import DTYPE_SPELLINGS
from bridge.precision.schemes import SCHEMES, Tile
from bridge.runtime.audit.record import format_tile

AUTOCAST_MODULES = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")
"""Modules of Transformer Engine with the state of its autocast, of newer releases first."""
SCHEME_OF_QUANTIZER = {
    "Float8Quantizer": "delayed",
    "Float8CurrentScalingQuantizer": "tensorwise",
    "Float8BlockQuantizer": "blockwise",
    "MXFP8Quantizer": "mxfp8",
    "NVFP4Quantizer": "nvfp4",
}
"""Class of a quantizer -> Megatron's name of the scheme."""
SCHEME_OF_STORAGE = {"MXFP8": "mxfp8", "NVFP4": "nvfp4", "Float8Blockwise": "blockwise"}
"""Start of the name of a storage's class -> Megatron's name of the scheme."""
STORAGE_BUFFERS = (
    "_data",
    "_transpose",
    "_scale_inv",
    "_rowwise_data",
    "_rowwise_scale_inv",
    "_columnwise_data",
    "_columnwise_scale_inv",
    "_amax_rowwise",
    "_amax_columnwise",
)
"""Attributes of Transformer Engine's storages with codes, scales and amax, of all schemes."""
TILE_SIZES = {"mxfp8": 32, "nvfp4": 16, "blockwise": 128}
"""Scheme with a scale per tile -> length of the tile in elements."""
_SCHEME_OF_RECIPE = {scheme.te_class: scheme.name for scheme in SCHEMES}


@dataclass(frozen=True, kw_only=True, slots=True)
class OperandFormat:
    """Format of an operand, in the spelling of the record's rows."""

    format: str
    """Number format: e4m3, e5m2, e2m1, bf16, ..., or "custom"."""
    scheme: str = "none"
    """Scaling scheme, "none" in high precision."""
    tile: str = ""
    """Elements that share a scale: "tensor" or rows x columns; empty in high precision."""

    @property
    def is_quantised(self) -> bool:
        """Whether the operand has codes and scales."""
        return self.scheme != "none"


def get_dtype_token(dtype: torch.dtype) -> str:
    """Return the project's token of a dtype, or torch's name where there is no token."""
    name = str(dtype).removeprefix("torch.")
    return DTYPE_SPELLINGS.get(name, name)


def is_quantised(tensor: Any) -> bool:
    """Return whether a tensor is a storage of Transformer Engine, or an emulated stored weight."""
    return any(hasattr(tensor, name) for name in ("_fp8_dtype", "_fp4_dtype", "stored"))


def count_stored_bytes(tensor: Any) -> int:
    """Return the bytes of a quantised tensor: codes and scales, row-wise and column-wise."""
    if hasattr(tensor, "stored"):
        return int(tensor.stored_bytes)
    total_bytes = 0
    for name in STORAGE_BUFFERS:
        buffer = getattr(tensor, name, None)
        if isinstance(buffer, torch.Tensor):
            total_bytes += buffer.numel() * buffer.element_size()
    return total_bytes


def get_operand_format(tensor: Any, *, columnwise: bool) -> OperandFormat:
    """Return the format of the row-wise or column-wise copy that a GEMM reads."""
    if getattr(tensor, "custom", False) is True:
        return OperandFormat(format="custom", scheme="custom")
    if not is_quantised(tensor):
        return OperandFormat(format=get_dtype_token(tensor.dtype))
    if hasattr(tensor, "stored"):
        return OperandFormat(format=tensor.stored.spec.format, scheme=tensor.stored.spec.scheme)
    number_format = _get_number_format(tensor)
    quantizer = getattr(tensor, "_quantizer", None)
    scheme = SCHEME_OF_QUANTIZER.get(type(quantizer).__name__) or _get_storage_scheme(tensor)
    if scheme not in TILE_SIZES:
        return OperandFormat(format=number_format, scheme=scheme, tile="tensor")
    is_square = getattr(tensor, "_is_2D_scaled", False)
    tile = get_tile(scheme, quantizer, columnwise=columnwise, is_square=is_square)
    has_hadamard = columnwise and bool(getattr(quantizer, "with_rht", False))
    is_stochastic = bool(getattr(quantizer, "stochastic_rounding", False))
    text = format_tile(tile, hadamard=has_hadamard, stochastic=is_stochastic)
    return OperandFormat(format=number_format, scheme=scheme, tile=text)


def _get_number_format(storage: Any) -> str:
    """Return the format of a storage's codes. FP4 has a single format, and FP8 has two.

    The enum members of Transformer Engine's extension are `kFloat8E4M3` and `kFloat8E5M2`.
    """
    fp8_dtype = getattr(storage, "_fp8_dtype", None)
    if fp8_dtype is None:
        return "e2m1"
    member = str(getattr(fp8_dtype, "name", fp8_dtype))
    return member[-len("E4M3") :].lower()


def get_tile(scheme: str, quantizer: Any, *, columnwise: bool, is_square: bool = False) -> Tile:
    """Return rows and columns that share a scale, in the axes of the tensor.

    Args:
        scheme: A scheme with a scale per tile.
        quantizer: Transformer Engine's quantizer. None: a storage without it.
        columnwise: Whether the column-wise copy is read.
        is_square: Whether the storage has two-dimensional tiles, whatever its quantizer has.
    """
    size = TILE_SIZES[scheme]
    if getattr(quantizer, "with_2d_quantization", False):
        is_square = True
    if getattr(quantizer, "block_scaling_dim", 1) == 2:
        is_square = True
    if is_square:
        return size, size
    if columnwise:
        return size, 1
    return 1, size


def _get_storage_scheme(storage: Any) -> str:
    """Return the scheme of a storage without a quantizer.

    The class of a storage with a scale per tensor is the same under delayed and current scaling.
    The recipe of the autocast distinguishes them.
    """
    class_name = type(storage).__name__
    for prefix, scheme in SCHEME_OF_STORAGE.items():
        if class_name.startswith(prefix):
            return scheme
    scheme = get_autocast_scheme()
    if scheme == "off":
        return "tensorwise"
    return scheme


def get_autocast_scheme() -> str:
    """Return the scheme of Transformer Engine's autocast, "off" outside of an autocast.

    A recipe that is not in the table of schemes is returned as the name of its class.
    """
    for name in AUTOCAST_MODULES:
        manager = getattr(sys.modules.get(name), "FP8GlobalStateManager", None)
        if manager is None:
            continue
        if not manager.is_fp8_enabled():
            return "off"
        recipe_class = type(manager.get_fp8_recipe()).__name__
        return _SCHEME_OF_RECIPE.get(recipe_class, recipe_class)
    return "off"


def is_te_module(module: torch.nn.Module) -> bool:
    """Return whether a module's class is one of Transformer Engine, or derived from such a class."""
    return hasattr(module, "fp8_meta")
