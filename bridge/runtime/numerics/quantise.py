# ruff: noqa: N803, N806  (shape suffixes are capitals)
"""Quantisation: `quantise(x, spec)` gives codes and scales, bit for bit those of Transformer Engine.

What happens to unusual values, per scheme (Transformer Engine 2.20, its kernels rather than its Python references):

|            | NaN element        | infinity in a tile              | tile of zeros     | -0.0 | tiny tile             |
|------------|--------------------|---------------------------------|-------------------|------|-----------------------|
| tensorwise | NaN, no effect     | scale 1, saturates: +-max       | scale 1, codes 0  | kept | at most FP32's max    |
| delayed    | on scales          | stored scale, saturates         | stored scale      | kept | stored scale          |
| blockwise  | as above           | scale 1, saturates              | scale 1, codes 0  | kept | at most input's max   |
| mxfp8      | as above           | scale 2^127, saturates          | scale 2^-127      | kept | scale 2^-127          |
| nvfp4      | +6: E2M1 has none  | saturates; GEMM factor infinite | S_dec 0           | kept | S_dec 0 or subnormal  |

So infinity is finite after quantisation wherever Transformer Engine saturates it: a check for overflow has to look at
the tensor before, or at `Quantised.amax`, which is infinite. NaN survives in all FP8 schemes.

Shapes: M rows (all leading axes together), K columns.
"""

from collections.abc import Callable
from typing import Any

import torch

from bridge.errors import PrecisionTypeError
from bridge.runtime.numerics import backend
from bridge.runtime.numerics.quantised import Quantised
from bridge.runtime.numerics.scaling import fp32, whole_nvfp4_scale, whole_scale
from bridge.runtime.numerics.spec import QuantSpec
from bridge.runtime.numerics.tiles import TilePass, TileResult

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """Return `x` as (M, K), all leading axes taken together; PrecisionTypeError for another dtype and for a scalar."""
    if x.dtype not in FLOATS:
        raise PrecisionTypeError(
            f"x: can be quantised from float32, bfloat16 or float16, got {x.dtype}."
        )
    if x.ndim == 0:
        raise PrecisionTypeError("x: needs at least one axis to be quantised along, got a scalar.")
    return x.reshape(-1, x.shape[-1]) if x.numel() else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def tensor_scale(amax: float, spec: QuantSpec) -> float:
    """Return the one factor that a scheme takes from the whole tensor's amax; 1.0 where it takes none."""
    if spec.scheme == "nvfp4":
        return whole_nvfp4_scale(amax)
    if spec.whole_tensor:
        return whole_scale(
            amax, spec.element.max, power_of_two=spec.power_of_two_scale, eps=spec.eps
        )
    return 1.0


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Return 63 random bits from a generator, torch's default one without."""
    device = "cpu" if generator is None else generator.device
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
    """Quantise a tensor, row-wise and column-wise; stochastic rounding draws its seed from torch's default generator.

    `x` is FP32, BF16 or FP16, with at least one axis; ragged edges make smaller tiles. `scale` is the stored factor of
    delayed scaling, None computes it. `reduce_amax` returns the maximum of an amax over the ranks that hold parts of
    the tensor. The table above has the special values; an empty tensor has amax 0.
    """
    x_MK = as_matrix(x.detach())
    factor, amax = _factor(x_MK, spec, scale, reduce_amax)
    found = _codes(x_MK, spec, False, factor) if row or spec.copies_share_values else None
    if amax is None:
        amax = backend.amax(x_MK) if found is None else found.amax
    copies = _stored(found, spec, False, factor) if row and found is not None else {}
    if col:
        amax_t = amax
        if found is None or not spec.copies_share_values:
            if spec.hadamard:
                amax_t = _amax(x_MK, reduce_amax, hadamard=True)
                factor = tensor_scale(amax_t, spec)
            found = _codes(x_MK, spec, True, factor)
        copies |= {
            f"{name}_t": tensor for name, tensor in _stored(found, spec, True, factor).items()
        }
        copies["amax_t"] = torch.tensor([amax_t], dtype=torch.float32, device=x.device)
    whole = torch.tensor([amax], dtype=torch.float32, device=x.device)
    return Quantised(spec=spec, shape=x.shape, dtype=x.dtype, amax=whole, **copies)


def _factor(
    x_MK: torch.Tensor,
    spec: QuantSpec,
    scale: torch.Tensor | float | None,
    reduce_amax: Callable[[float], float] | None,
) -> tuple[float, float | None]:
    """Return the factor of the whole tensor, and the amax that it was computed from; 1 where tiles have their own."""
    if scale is not None:
        return float(scale), None
    if spec.scheme == "delayed":
        raise PrecisionTypeError(
            "scale: delayed scaling quantises with a stored scale. Pass scale=."
        )
    if not spec.needs_amax:
        return 1.0, None
    amax = _amax(x_MK, reduce_amax)
    return tensor_scale(amax, spec), amax


def _amax(
    x_MK: torch.Tensor, reduce_amax: Callable[[float], float] | None, *, hadamard: bool = False
) -> float:
    """Return the amax of a tensor or of its transform, that of all its parts where it is spread over ranks."""
    own = backend.amax(x_MK, hadamard=hadamard)
    return own if reduce_amax is None else reduce_amax(own)


def _codes(x_MK: torch.Tensor, spec: QuantSpec, columnwise: bool, scale: float) -> TileResult:
    seed = draw_seed() if spec.stochastic else None
    return backend.run(
        x_MK, TilePass(spec=spec, columnwise=columnwise, scale=scale, seed=seed, codes=True)
    )


def _stored(result: TileResult, spec: QuantSpec, columnwise: bool, scale: float) -> dict[str, Any]:
    """Return `codes` and `scale_inv` in Transformer Engine's layout."""
    codes, scales, transposes = (
        result.values,
        result.scale_inv,
        columnwise and spec.scheme != "mxfp8",
    )
    rows, columns = codes.shape
    codes = backend.laid_out(codes, transposed=transposes, packed=spec.format == "e2m1")
    if scales is None:
        whole = torch.tensor([fp32(1.0 / scale)], dtype=torch.float32, device=codes.device)
        return {"codes": codes, "scale_inv": whole}
    tile = spec.tile(columnwise)
    if spec.scheme in ("mxfp8", "nvfp4") and tile[0] == tile[1]:
        axis, size = (1, columns) if columnwise else (0, rows)
        scales = scales.repeat_interleave(tile[0], axis).narrow(axis, 0, size)
    return {"codes": codes, "scale_inv": scales.T.contiguous() if transposes else scales}
