"""GEMMs of Transformer Engine, seen where its Python calls the compiled extension.

The same code serves a GPU and the stand-in on a CPU: both are the module
`transformer_engine_torch`. Nothing is imported here; a process that has not loaded the extension
runs none of its GEMMs.

Source: Transformer Engine 2.20.2 pytorch/cpp_extensions/gemm.py, 2.9.0 and 2.14.0 likewise.
"""

import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from bridge.precision.schemes import SCHEMES
from bridge.precision.values import SPELLINGS
from bridge.runtime.audit.record import tile_name

logger = logging.getLogger(__name__)
EXTENSION = "transformer_engine_torch"
CUSTOM = "transformer_engine.pytorch.cpp_extensions.gemm"
FUSED = "fused_weight_gradient_mlp_cuda"
"""Apex's extension.

With it Megatron adds weight gradients to their buffer outside of Transformer Engine.
"""
STATES = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")
"""Modules that hold the state of the autocast; the first of them in newer releases."""
GEMM_OF_LAYOUT = {(True, False): "fprop", (False, False): "dgrad", (False, True): "wgrad"}
"""(transA, transB) -> the GEMM of a linear layer."""
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
STORED = (
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
"""Buffers of the storages of all schemes."""
TILE_SIZES = {"mxfp8": 32, "nvfp4": 16, "blockwise": 128}
"""Scheme with a scale per tile -> the tile's length."""
_SCHEME_OF_RECIPE = {scheme.te_class: scheme.name for scheme in SCHEMES}


@dataclass(frozen=True, kw_only=True, slots=True)
class TeGemm:
    """One call of the extension: a GEMM, or a group of them with equal formats."""

    gemm: str
    left: Any
    """Operand with the result's first axis: a tensor, or a storage of Transformer Engine."""
    right: Any
    """Operand with the result's last axis, the first one of cuBLAS."""
    out: Any
    bias: Any = None
    """Added to the product before it was rounded."""
    part: int | None = None
    """Number of the GEMM in its group; None outside of one."""
    splits: Sequence[int] = ()
    """Rows of each GEMM of the group."""
    split_accumulator: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Described:
    """Formats of an operand."""

    format: str
    scheme: str = "none"
    tile: str = ""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the token of a dtype, or torch's own name."""
    name = str(dtype).removeprefix("torch.")
    return SPELLINGS.get(name, name)


def is_quantised(tensor: Any) -> bool:
    """Return whether a tensor is a storage of Transformer Engine, or an emulated stored weight."""
    return any(hasattr(tensor, name) for name in ("_fp8_dtype", "_fp4_dtype", "stored"))


def stored_bytes(tensor: Any) -> int:
    """Return the bytes of codes and scales that a quantised tensor holds, both copies of them."""
    if hasattr(tensor, "stored"):
        return int(tensor.stored_bytes)
    stored = 0
    for name in STORED:
        buffer = getattr(tensor, name, None)
        if isinstance(buffer, torch.Tensor):
            stored += buffer.numel() * buffer.element_size()
    return stored


def describe(tensor: Any, *, columnwise: bool) -> Described:
    """Return the formats of the copy of an operand that a GEMM reads."""
    if getattr(tensor, "custom", False) is True:
        return Described(format="custom", scheme="custom")
    if not is_quantised(tensor):
        return Described(format=dtype_name(tensor.dtype))
    if hasattr(tensor, "stored"):
        return Described(format=tensor.stored.spec.format, scheme=tensor.stored.spec.scheme)
    name = "e2m1"
    code = getattr(tensor, "_fp8_dtype", None)
    if code is not None:
        name = str(getattr(code, "name", code))[-4:].lower()
    quantizer = getattr(tensor, "_quantizer", None)
    scheme = SCHEME_OF_QUANTIZER.get(type(quantizer).__name__) or _scheme_of_storage(tensor)
    if scheme not in TILE_SIZES:
        return Described(format=name, scheme=scheme, tile="tensor")
    is_square = getattr(tensor, "_is_2D_scaled", False)
    tile = tile_of(scheme, quantizer, columnwise=columnwise, is_square=is_square)
    hadamard = columnwise and bool(getattr(quantizer, "with_rht", False))
    stochastic = bool(getattr(quantizer, "stochastic_rounding", False))
    text = tile_name(tile, hadamard=hadamard, stochastic=stochastic)
    return Described(format=name, scheme=scheme, tile=text)


def tile_of(
    scheme: str, quantizer: Any, *, columnwise: bool, is_square: bool = False
) -> tuple[int, int]:
    """Return the tile of one copy in the axes of the tensor.

    `is_square` where its storage says so.
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


def _scheme_of_storage(tensor: Any) -> str:
    """Return the scheme of a tensor without a quantizer.

    Per-tensor scales are those of the autocast's recipe.
    """
    kind = type(tensor).__name__
    for start, scheme in SCHEME_OF_STORAGE.items():
        if kind.startswith(start):
            return scheme
    scheme = context()
    if scheme == "off":
        return "tensorwise"
    return scheme


def context() -> str:
    """Return the scheme of the autocast that is on, "off" outside of one."""
    for name in STATES:
        manager = getattr(sys.modules.get(name), "FP8GlobalStateManager", None)
        if manager is not None:
            if not manager.is_fp8_enabled():
                return "off"
            recipe = type(manager.get_fp8_recipe()).__name__
            return _SCHEME_OF_RECIPE.get(recipe, recipe)
    return "off"


def is_te(module: torch.nn.Module) -> bool:
    """Return whether a module is one of Transformer Engine's, or derived from one."""
    return hasattr(module, "fp8_meta")


def _of_one(args: Any, _kwargs: Any, result: Any) -> Iterator[TeGemm]:
    right, transposed, left, is_wgrad = args[:4]
    bias, has_gelu, is_bias_gradient = args[7], args[9], args[11]
    out = None  # behind the GELU
    if not has_gelu:
        out = result[0]
    if bias is not None and (is_bias_gradient or not bias.numel()):
        bias = None
    yield TeGemm(
        gemm=GEMM_OF_LAYOUT[transposed, is_wgrad],
        left=left,
        right=right,
        out=out,
        bias=bias,
        split_accumulator=bool(args[15]),
    )


def _of_group(args: Any, _kwargs: Any, _result: Any) -> Iterator[TeGemm]:
    rights, transposed, lefts, is_wgrad, outs = args[:5]
    gemm, splits = GEMM_OF_LAYOUT[transposed, is_wgrad], list(args[6] or ())
    has_single_out = args[9]
    if has_single_out and splits:
        if isinstance(outs, (list, tuple)):
            outs = outs[0]
        outs = torch.split(outs, splits)
    flags = {"splits": splits, "split_accumulator": args[15]}
    for part, (left, right) in enumerate(zip(lefts, rights, strict=True)):
        yield TeGemm(gemm=gemm, left=left, right=right, out=outs[part], part=part, **flags)


def _of_custom(args: Any, kwargs: Any, result: Any) -> Iterator[TeGemm]:
    layout = "TN"
    if "layout" in kwargs:
        layout = kwargs["layout"]
    elif len(args) > 8:
        layout = args[8]
    gemm = GEMM_OF_LAYOUT[layout[0] == "T", layout[1] == "T"]
    yield TeGemm(gemm=gemm, left=args[1], right=args[0], out=result[0])


def _of_fused(args: Any, _kwargs: Any, _result: Any) -> Iterator[TeGemm]:
    right, left, buffer = args
    yield TeGemm(gemm="wgrad", left=left, right=right, out=buffer)


Gemms = Callable[[Any, Any, Any], Iterator[TeGemm]]
"""The GEMMs of a call, by its arguments and its result."""
_CALLS: tuple[tuple[str, str, Gemms, int], ...] = (
    (EXTENSION, "generic_gemm", _of_one, 16),
    (EXTENSION, "te_general_grouped_gemm", _of_group, 16),
    (CUSTOM, "custom_gemm", _of_custom, 2),
    (FUSED, "wgrad_gemm_accum_fp32", _of_fused, 3),
    (FUSED, "wgrad_gemm_accum_fp16", _of_fused, 3),
)
"""Module, function, the GEMMs of a call, and how many positional arguments are read for them."""


@contextmanager
def watching(watcher: Callable[[TeGemm], None], quiet: Callable[[], Any]) -> Iterator[None]:
    """Hand every GEMM of the extension to a watcher, after it has run, for a ``with`` block.

    `quiet` makes a context for the call itself, in which the operators of torch are part of the
    GEMM.
    """

    def watched(original: Callable[..., Any], gemms: Gemms, needed: int) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            with quiet():
                result = original(*args, **kwargs)
            if len(args) < needed:
                _log_unseen(original.__name__, len(args), needed)
                return result
            for gemm in gemms(args, kwargs, result):
                watcher(gemm)
            return result

        return call

    with ExitStack() as stack:
        for name, function, gemms, needed in _CALLS:
            owner = sys.modules.get(name)
            original = getattr(owner, "__dict__", {}).get(function)
            if original is not None:
                stack.enter_context(patch.object(owner, function, watched(original, gemms, needed)))
        yield


@functools.cache
def _log_unseen(function: str, found: int, needed: int) -> None:
    """Log once that calls of another release are not read."""
    logger.warning(
        "%s of Transformer Engine is called with %d arguments, not %d: its GEMMs are not recorded. "
        "The record was written for Transformer Engine 2.9 to 2.20.",
        function,
        found,
        needed,
    )
