# ruff: noqa: N803, N806  (shape suffixes are capitals)
"""Quantisation: `quantise(x, spec)` gives codes and scales with the bits of Transformer Engine.

What happens to unusual values, per scheme (Transformer Engine 2.20, its kernels rather than its
Python references):

|            | NaN element | infinity in a tile     | tile of zeros    | -0.0 | tiny tile          |
|------------|-------------|------------------------|------------------|------|--------------------|
| tensorwise | NaN         | scale 1, +-max         | scale 1, codes 0 | kept | FP32's max         |
| delayed    | NaN         | stored scale, +-max    | stored scale     | kept | stored scale       |
| blockwise  | NaN         | scale 1, +-max         | scale 1, codes 0 | kept | input's max        |
| mxfp8      | NaN         | scale 2^127, +-max     | scale 2^-127     | kept | scale 2^-127       |
| nvfp4      | +6, no NaN  | +-max, infinite factor | S_dec 0          | kept | S_dec 0, subnormal |

NaN has no effect on scales. +-max is saturation; the infinite factor is that of NVFP4's GEMM. The
scale of a tiny tile is at most the largest number of FP32, or of the input's dtype.

So infinity is finite after quantisation wherever Transformer Engine saturates it: a check for
overflow has to look at the tensor before, or at `Quantised.amax`, which is infinite. NaN survives
in all FP8 schemes.

Shapes: M rows (the product of all leading axes), K columns.
"""

from collections.abc import Callable

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
    """Return the scale that a scheme computes from the whole tensor's amax.

    The scale is 1.0 for a scheme with a scale per tile alone.
    """
    if spec.scheme == "nvfp4":
        return compute_nvfp4_tensor_scale(amax)
    if spec.has_single_scale:
        power_of_two = spec.power_of_two_scale
        return compute_scalar_scale(amax, spec.element.max, power_of_two=power_of_two, eps=spec.eps)
    return 1.0


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Return 63 random bits from a generator; None is torch's default generator."""
    device = torch.device("cpu")
    if generator is not None:
        device = generator.device
    return int(torch.randint(0, 2**63 - 1, (), generator=generator, device=device).item())


def quantise(
    x: torch.Tensor,
    spec: QuantSpec,
    *,
    row: bool = True,
    col: bool = True,
    scale: torch.Tensor | float | None = None,
    reduce_amax: Callable[[float], float] | None = None,
) -> Quantised:
    """Quantise a tensor, row-wise and column-wise.

    Stochastic rounding draws its seed from torch's default generator.

    Args:
        x: FP32, BF16 or FP16, with at least one axis. Ragged edges make smaller tiles.
        spec: Format, scale rule and tiles.
        row: Whether the row-wise copy is made.
        col: Whether the column-wise copy is made.
        scale: Stored scale of delayed scaling. None computes the scale.
        reduce_amax: Returns the maximum of an amax over the ranks that have parts of the tensor.

    Returns:
        Codes and scales of the copies. The table above has the special values; an empty tensor has
        amax 0.

    Raises:
        PrecisionTypeError: `x` cannot be quantised, or delayed scaling has no scale.
    """
    x_MK = as_matrix(x.detach())
    factor, amax = _choose_tensor_scale(x_MK, spec, scale, reduce_amax)
    rowwise = None
    if row or spec.copies_share_values:
        rowwise = _run_tile_pass(x_MK, spec, columnwise=False, scale=factor)
    if amax is None and rowwise is not None:
        amax = rowwise.amax
    elif amax is None:
        amax = dispatch.compute_amax(x_MK)
    codes, scale_inv = None, None
    if row and rowwise is not None:
        codes, scale_inv = _lay_out_copy(rowwise, spec, columnwise=False, scale=factor)
    codes_t, scale_inv_t, amax_t = None, None, None
    if col:
        column_amax = amax
        if spec.hadamard:
            column_amax = _compute_amax(x_MK, reduce_amax, hadamard=True)
            factor = compute_tensor_scale(column_amax, spec)
        columnwise = rowwise
        if columnwise is None or not spec.copies_share_values:
            columnwise = _run_tile_pass(x_MK, spec, columnwise=True, scale=factor)
        codes_t, scale_inv_t = _lay_out_copy(columnwise, spec, columnwise=True, scale=factor)
        amax_t = _make_fp32_tensor(column_amax, x.device)
    return Quantised(
        spec=spec,
        shape=x.shape,
        dtype=x.dtype,
        codes=codes,
        scale_inv=scale_inv,
        amax=_make_fp32_tensor(amax, x.device),
        codes_t=codes_t,
        scale_inv_t=scale_inv_t,
        amax_t=amax_t,
    )


def _choose_tensor_scale(
    x_MK: torch.Tensor,
    spec: QuantSpec,
    scale: torch.Tensor | float | None,
    reduce_amax: Callable[[float], float] | None,
) -> tuple[float, float | None]:
    """Return the scale of the whole tensor, and the amax that it was computed from.

    The scale is 1 for a scheme with a scale per tile. The amax is None where none was needed.
    """
    if scale is not None:
        return float(scale), None
    if spec.scheme == "delayed":
        raise PrecisionTypeError(
            "scale: delayed scaling quantises with a stored scale. Pass scale=."
        )
    if not spec.needs_amax:
        return 1.0, None
    amax = _compute_amax(x_MK, reduce_amax)
    return compute_tensor_scale(amax, spec), amax


def _compute_amax(
    x_MK: torch.Tensor, reduce_amax: Callable[[float], float] | None, *, hadamard: bool = False
) -> float:
    """Return the amax of a tensor or of its transform, over all ranks that hold parts of it."""
    amax = dispatch.compute_amax(x_MK, hadamard=hadamard)
    if reduce_amax is None:
        return amax
    return reduce_amax(amax)


def _run_tile_pass(
    x_MK: torch.Tensor, spec: QuantSpec, *, columnwise: bool, scale: float
) -> TileResult:
    """Return codes and scales of a copy, before they are laid out."""
    seed = None
    if spec.stochastic:
        seed = draw_seed()
    tile_pass = TilePass(spec=spec, columnwise=columnwise, scale=scale, seed=seed, codes=True)
    return dispatch.run_tile_pass(x_MK, tile_pass)


def _lay_out_copy(
    result: TileResult, spec: QuantSpec, *, columnwise: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scale_inv in Transformer Engine's layout."""
    transposed = columnwise and spec.scheme != "mxfp8"
    rows, columns = result.values.shape
    codes = dispatch.lay_out_codes(
        result.values, transposed=transposed, packed=spec.format == "e2m1"
    )
    scales = result.scale_inv
    if scales is None:
        return codes, _make_fp32_tensor(round_to_fp32(1.0 / scale), codes.device)
    height, width = spec.tile(columnwise)
    if spec.scheme in ("mxfp8", "nvfp4") and height == width:
        axis, size = 0, rows
        if columnwise:
            axis, size = 1, columns
        scales = scales.repeat_interleave(height, axis).narrow(axis, 0, size)
    if transposed:
        scales = scales.T.contiguous()
    return codes, scales


def _make_fp32_tensor(value: float, device: torch.device) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float32, device=device)
