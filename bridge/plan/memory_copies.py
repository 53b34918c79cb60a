"""Bytes of what belongs to a tensor in a scaled format: elements, the scales of each copy, and amax state.

Shapes of scales are those that Transformer Engine allocates (2.20 pytorch/csrc/quantizer.cpp, common/recipe): row-wise
and column-wise MXFP8 and NVFP4 scales are padded to multiples of 128 and 4, block scales to multiples of 4.
"""

from bridge.precision.formats import FORMATS
from bridge.precision.schemes import WHOLE, Scheme

FP32_BYTES = 4


def element_bytes(dtype: str) -> float:
    """Return the bytes of one element of a format; a factory's own format counts as one byte."""
    if dtype == "fp64":
        return 8
    return FORMATS[dtype].bits / 8 if dtype in FORMATS else 1


def has_column_copy(scheme: Scheme | None, capability: tuple[int, int] | None) -> bool:
    """Return whether a second copy is kept for the GEMMs that read the tensor along its other axis.

    Per-tensor scaling needs a transpose on Ada and Hopper, whose FP8 GEMMs read one layout only; Blackwell reads both
    (compute capability 10 or 11, and 13 on; Transformer Engine 2.20 pytorch/utils.py). An unknown GPU counts as Hopper.
    """
    if not is_per_tensor(scheme) or capability is None:
        return True
    return not ((10, 0) <= capability < (12, 0) or capability >= (13, 0))


def scale_bytes(scheme: Scheme | None, rows: int, columns: int) -> int:
    """Return the bytes of the scales of a weight's row-wise copy; the column-wise copy has the transposed shape."""
    if scheme is None or is_per_tensor(scheme):
        return FP32_BYTES
    tile = scheme.operand("weight").row
    if scheme.name == "blockwise":
        return -(-rows // tile[0]) * _padded(-(-columns // tile[1]), 4) * FP32_BYTES
    size = element_bytes(scheme.scale_format or "fp32")
    per_tensor = FP32_BYTES if scheme.tensor_scale_format else 0
    return round(_padded(rows, 128) * _padded(-(-columns // max(tile)), 4) * size) + per_tensor


def operand_bytes(dtype: str, scheme: Scheme | None) -> float:
    """Return the bytes per element of a linear's quantised input, the scales of its column-wise copy included."""
    if scheme is None or is_per_tensor(scheme):
        return element_bytes(dtype)
    return element_bytes(dtype) + element_bytes(scheme.scale_format or "fp32") / max(scheme.operand("input").column)


def is_per_tensor(scheme: Scheme | None) -> bool:
    """Return whether one scale serves a whole tensor; a transpose shares the scale of its original then."""
    return scheme is None or all(operand.row == WHOLE for operand in scheme.operands)


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
