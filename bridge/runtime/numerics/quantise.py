# ruff: noqa: N803, N806  (shape suffixes are capitals)
"""`quantise`: a tensor -> codes and scales with the same bits as Transformer Engine.

The results for special values, per scheme (as in the kernels of Transformer Engine 2.20, and not as
in its Python references):

|            | NaN element | infinity in a tile     | tile of zeros    | -0.0 | tiny tile          |
|------------|-------------|------------------------|------------------|------|--------------------|
| tensorwise | NaN         | scale 1, +-max         | scale 1, codes 0 | kept | FP32's max         |
| delayed    | NaN         | stored scale, +-max    | stored scale     | kept | stored scale       |
| blockwise  | NaN         | scale 1, +-max         | scale 1, codes 0 | kept | input's max        |
| mxfp8      | NaN         | scale 2^127, +-max     | scale 2^-127     | kept | scale 2^-127       |
| nvfp4      | +6, no NaN  | +-max, infinite factor | S_dec 0          | kept | S_dec 0, subnormal |

NaN has no effect on scales. +-max is the saturated value. The infinite factor is the factor of
NVFP4's GEMM. The scale of a tiny tile is at most the largest number of FP32, or of the input's
dtype.

So an infinite value is finite after quantisation. A check for overflow has to read the tensor
before quantisation, or `Quantised.amax`, which is infinite. NaN stays NaN in all FP8 schemes.

Shapes: M rows (the product of all leading axes), K columns.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from bridge.errors import PrecisionTypeError
from bridge.runtime.numerics import dispatch
from bridge.runtime.numerics.quantised import Quantised
from bridge.runtime.numerics.scaling import (
    compute_nvfp4_tensor_scale,
    compute_scalar_scale,
    round_to_fp32,
)
from bridge.runtime.numerics.spec import QuantSpec
from bridge.runtime.numerics.tiles import TilePass, TileResult

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that can be quantised."""


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """Return `x` as (M, K): M is the product of all leading axes.

    Raises:
        PrecisionTypeError: `x` is a scalar, or has a dtype that cannot be quantised.
    """
    if x.dtype not in FLOAT_DTYPES:
        raise PrecisionTypeError(
            f"x: can be quantised from float32, bfloat16 or float16, got {x.dtype}."
        )
    if x.ndim == 0:
        raise PrecisionTypeError("x: needs at least one axis to be quantised along, got a scalar.")
    if not x.numel():  # reshape cannot infer -1 for an empty tensor
        return x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return x.reshape(-1, x.shape[-1])


def compute_tensor_scale(amax: float, spec: QuantSpec) -> float:
    """Return the FP32 scale of a whole tensor with an amax. Under NVFP4 it is S_enc.

    Args:
        amax: Largest magnitude of the tensor.
        spec: Format and scale rule of a scheme that `needs_amax`.
    """
    if spec.has_second_level:
        return compute_nvfp4_tensor_scale(amax)
    power_of_two = spec.power_of_two_scale
    return compute_scalar_scale(amax, spec.element.max, power_of_two=power_of_two, eps=spec.eps)


def choose_tensor_scale(
    x_MK: torch.Tensor,
    spec: QuantSpec,
    tensor_scale: float | None,
    *,
    hadamard: bool = False,
    reduce_amax: Callable[[float], float] | None = None,
) -> tuple[float, float | None]:
    """Return the scale of the whole tensor, and the amax from which it was computed.

    The scale is 1.0 for a scheme that has only scales per tile. The amax is None if the scale was
    not computed.

    Args:
        x_MK: FP32, BF16 or FP16.
        spec: Format, scale rule and tiles.
        tensor_scale: The stored scale of delayed scaling, which is returned. None: the scale is
            computed.
        hadamard: Whether the transformed matrix is quantised, which has another amax.
        reduce_amax: Returns the maximum of an amax over the ranks that have parts of the tensor.
            None: this rank has all of it.
    """
    if tensor_scale is not None:
        return tensor_scale, None
    if not spec.needs_amax:
        return 1.0, None
    amax = _compute_amax(x_MK, reduce_amax, hadamard=hadamard)
    return compute_tensor_scale(amax, spec), amax


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Return 63 random bits from a generator. None: torch's default generator."""
    device = torch.device("cpu")
    if generator is not None:
        device = generator.device
    return int(torch.randint(0, 2**63 - 1, (), generator=generator, device=device).item())


def quantise(
    x: torch.Tensor,
    spec: QuantSpec,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    tensor_scale: torch.Tensor | float | None = None,
    reduce_amax: Callable[[float], float] | None = None,
) -> Quantised:
    """Quantise a tensor, row-wise and column-wise.

    Stochastic rounding draws its seed from torch's default generator.

    Args:
        x: FP32, BF16 or FP16, with at least one axis. Ragged edges make smaller tiles.
        spec: Format, scale rule and tiles.
        rowwise: Whether the row-wise copy is made.
        columnwise: Whether the column-wise copy is made.
        tensor_scale: Stored scale of delayed scaling. None: the scale is computed.
        reduce_amax: Returns the maximum of an amax over the ranks that have parts of the tensor.
            None: this rank has all of it.

    Returns:
        Codes and scales of the copies. The table in this file's docstring has the special values.
        An empty tensor has amax 0.

    Raises:
        PrecisionTypeError: `x` cannot be quantised, or delayed scaling has no scale.
    """
    x_MK = as_matrix(x.detach())
    if tensor_scale is None and spec.scheme == "delayed":
        raise PrecisionTypeError(
            "tensor_scale: delayed scaling quantises with a stored scale. Pass tensor_scale=."
        )
    if tensor_scale is not None:
        tensor_scale = float(tensor_scale)
    tensor_scale, amax = choose_tensor_scale(x_MK, spec, tensor_scale, reduce_amax=reduce_amax)
    row_result = None
    if rowwise or spec.copies_share_values:
        row_result = _make_codes(x_MK, spec, columnwise=False, tensor_scale=tensor_scale)
    if amax is None and row_result is not None:
        amax = row_result.amax
    elif amax is None:
        amax = dispatch.compute_amax(x_MK)
    quantised = Quantised(
        spec=spec, shape=x.shape, dtype=x.dtype, amax=_make_fp32_tensor(amax, x.device)
    )
    if rowwise and row_result is not None:
        codes, scale_inv = _lay_out_copy(
            row_result, spec, columnwise=False, tensor_scale=tensor_scale
        )
        quantised = replace(quantised, codes=codes, scale_inv=scale_inv)
    if not columnwise:
        return quantised
    if row_result is not None and spec.copies_share_values:
        column_result = row_result
    else:
        if spec.hadamard:  # the transform has another amax, and so another scale
            amax = _compute_amax(x_MK, reduce_amax, hadamard=True)
            tensor_scale = compute_tensor_scale(amax, spec)
        column_result = _make_codes(x_MK, spec, columnwise=True, tensor_scale=tensor_scale)
    codes_t, scale_inv_t = _lay_out_copy(
        column_result, spec, columnwise=True, tensor_scale=tensor_scale
    )
    amax_t = _make_fp32_tensor(amax, x.device)
    return replace(quantised, codes_t=codes_t, scale_inv_t=scale_inv_t, amax_t=amax_t)


def _compute_amax(
    x_MK: torch.Tensor, reduce_amax: Callable[[float], float] | None, *, hadamard: bool
) -> float:
    """Return the amax of a matrix or of its transform, over all ranks that have parts of it."""
    amax = dispatch.compute_amax(x_MK, hadamard=hadamard)
    if reduce_amax is None:
        return amax
    return reduce_amax(amax)


def _make_codes(
    x_MK: torch.Tensor, spec: QuantSpec, *, columnwise: bool, tensor_scale: float
) -> TileResult:
    """Return codes and scales of a copy, before they are laid out."""
    seed = None
    if spec.stochastic:
        seed = draw_seed()
    tile_pass = TilePass(
        spec=spec, columnwise=columnwise, tensor_scale=tensor_scale, seed=seed, makes_codes=True
    )
    return dispatch.run_tile_pass(x_MK, tile_pass)


def _lay_out_copy(
    result: TileResult, spec: QuantSpec, *, columnwise: bool, tensor_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scale_inv of a copy in Transformer Engine's layout (`quantised.py`).

    Args:
        result: Codes and scales in the axes of the tensor.
        spec: Format, scale rule and tiles.
        columnwise: Whether it is the column-wise copy.
        tensor_scale: Scale of the whole tensor, which becomes scale_inv under the rule "tensor".
    """
    transposed = spec.is_transposed(columnwise)
    rows, columns = result.values.shape
    codes = dispatch.lay_out_codes(
        result.values, transposed=transposed, packed=spec.format == "e2m1"
    )
    scales = result.scale_inv
    if scales is None:
        return codes, _make_fp32_tensor(round_to_fp32(1.0 / tensor_scale), codes.device)
    height, width = spec.tile(columnwise)
    if spec.repeats_square_scales and height == width:
        # The scale of a square tile is stored for each of its rows, or for each of its columns in
        # the column-wise copy.
        axis, size = 0, rows
        if columnwise:
            axis, size = 1, columns
        scales = scales.repeat_interleave(height, axis).narrow(axis, 0, size)
    if transposed:
        scales = scales.T.contiguous()
    return codes, scales


def _make_fp32_tensor(value: float, device: torch.device) -> torch.Tensor:
    """Return a number as a tensor of shape (1,)."""
    return torch.tensor([value], dtype=torch.float32, device=device)
