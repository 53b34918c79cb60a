"""Quantisers and linear layers of other libraries, called as their documentation does, for benchmark_numerics.py.

A quantiser takes a BF16 matrix and returns a call that is timed, and the dequantised values of its result. Conversions
to the type that a library takes, and back, are not timed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Values = Callable[[Any], torch.Tensor]
    Quantiser = Callable[[torch.Tensor], tuple[Callable[[], Any], Values]]
    Linear = Callable[[torch.Tensor], torch.nn.Module]

E4M3 = torch.float8_e4m3fn


def torch_fp8(x: torch.Tensor) -> tuple[Callable[[], Any], Values]:
    """Cast with torch's own operations: amax, scale, saturation, cast."""

    def cast() -> tuple[torch.Tensor, torch.Tensor]:
        scale = 448.0 / x.abs().amax().float()
        return (x.float() * scale).clamp_(-448.0, 448.0).to(E4M3), scale

    return cast, lambda made: made[0].float() / made[1]


def torchao_fp8(x: torch.Tensor) -> tuple[Callable[[], Any], Values]:
    """Call torchao's dynamic tensorwise scaling."""
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    config = LinearMMConfig()
    return lambda: hp_tensor_to_float8_dynamic(x, E4M3, config), lambda made: made.to_original_precision()


def qtorch_fp8(x: torch.Tensor) -> tuple[Callable[[], Any], Values]:
    """Call qtorch's compiled rounding."""
    from qtorch.quant import float_quantize

    x = x.float()
    return lambda: float_quantize(x, exp=4, man=3, rounding="nearest"), lambda made: made


def pychop_fp8(x: torch.Tensor) -> tuple[Callable[[], Any], Values]:
    """Call pychop's rounding to four significant bits."""
    import pychop
    from pychop import Customs
    from pychop.tch.float_point import Chop_

    pychop.backend("torch")
    x, chop = x.float(), Chop_(customs=Customs(t=4, emax=8))
    return lambda: chop(x), lambda made: made


def gfloat_fp8(x: torch.Tensor) -> tuple[Callable[[], Any], Values]:
    """Call gfloat's rounding of NumPy arrays."""
    import gfloat
    from gfloat.formats import format_info_ocp_e4m3

    array = x.float().numpy()
    return lambda: gfloat.round_ndarray(format_info_ocp_e4m3, array, sat=True), torch.from_numpy


def torchao_mxfp8(x: torch.Tensor) -> tuple[Callable[[], Any], Values]:
    """Call torchao's MXTensor with scales rounded up, as Transformer Engine's are."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    return lambda: MXTensor.to_mx(x, E4M3, 32, ScaleCalculationMode.RCEIL), lambda made: made.dequantize()


def pychop_mxfp8(x: torch.Tensor) -> tuple[Callable[[], Any], Values]:
    """Call pychop's MX quantiser."""
    from pychop.mx_formats import mx_quantize

    x = x.float()
    return lambda: mx_quantize(x, "mxfp8_e4m3", 32, backend="torch"), lambda made: made


def torchmx_mxfp8(x: torch.Tensor) -> tuple[Callable[[], Any], Values]:
    """Call torchmx's MXTensor."""
    from torchmx import dtypes
    from torchmx.mx_tensor import MXTensor

    return lambda: MXTensor.to_mx(x, dtypes.float8_e4m3, 32), lambda made: made.to_dtype(torch.bfloat16)


def torchao_nvfp4(x: torch.Tensor) -> tuple[Callable[[], Any], Values]:
    """Call torchao's NVFP4Tensor with its factor of the whole tensor."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    def quantise() -> Any:
        return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max()))

    return quantise, lambda made: made.dequantize()


QUANTISERS: dict[str, list[tuple[str, str, Quantiser]]] = {
    "FP8": [
        ("torch", "current scaling", torch_fp8),
        ("torchao", "current scaling", torchao_fp8),
        ("qtorch", "rounding alone", qtorch_fp8),
        ("gfloat", "rounding alone", gfloat_fp8),
        ("pychop", "rounding alone", pychop_fp8),
    ],
    "MXFP8": [
        ("torchao", "scales rounded up", torchao_mxfp8),
        ("torchmx", "", torchmx_mxfp8),
        ("pychop", "", pychop_mxfp8),
    ],
    "NVFP4": [("torchao", "1x16 blocks", torchao_nvfp4)],
}
"""Format -> library, its rule, and its quantiser."""
NOT_CALLED = {
    "microxcaling": "no release on the Python package index; its repository alone has it",
    "gfloat, MXFP8": "block formats are quantised value by value, in Python",
}
"""Libraries without a row, and the reason."""


def torchao_linear(w: torch.Tensor) -> torch.nn.Module:
    """Return torchao's tensorwise FP8 linear for training, emulated."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    holder = torch.nn.Sequential(_plain(w))
    convert_to_float8_training(holder, config=Float8LinearConfig(emulate=True))
    return holder[0]


def qtorch_linear(w: torch.Tensor) -> torch.nn.Module:
    """Return a linear between two of qtorch's quantisers: E4M3 operands, E5M2 gradients, rounding alone."""
    from qtorch import FloatingPoint
    from qtorch.quant import Quantizer

    forward, backward = FloatingPoint(exp=4, man=3), FloatingPoint(exp=5, man=2)
    rounding = {"forward_rounding": "nearest", "backward_rounding": "nearest"}

    class Rounded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(w.detach().float())
            self.operand = Quantizer(forward, None, **rounding)
            self.result = Quantizer(None, backward, **rounding)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            product = self.operand(x.float()).bfloat16() @ self.operand(self.weight).bfloat16().T
            return self.result(product.float()).bfloat16()

    return Rounded()


LINEARS: dict[str, tuple[str, Linear]] = {
    "torchao": ("tensorwise FP8, `emulate=True`", torchao_linear),
    "qtorch": ("E4M3 and E5M2 by rounding alone", qtorch_linear),
}


def _plain(w: torch.Tensor) -> torch.nn.Linear:
    plain = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=torch.bfloat16)
    plain.weight.data.copy_(w.detach())
    return plain
