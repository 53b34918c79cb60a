"""Activations of `LayerNormMLP` and of fused operators, forward and backward, quantised where a quantizer is given.

Delayed scaling and MXFP8 quantise the FP32 value; every other scheme rounds it to the input's dtype first.

Source: pytorch/csrc/extensions/activation.cpp; common/activation/.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 torch's own abbreviation

from bridge.megatron.te_cpu.storage import kind_of, quantize

Elementwise = Callable[[torch.Tensor], torch.Tensor]

_FUSED = ("Float8Quantizer", "MXFP8Quantizer")


def gelu_values(x: torch.Tensor) -> torch.Tensor:
    """Return GELU in its tanh form."""
    return F.gelu(x, approximate="tanh")


def gelu_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of GELU's input."""
    return _gradient(gelu_values, grad, x)


_PLAIN: dict[str, Elementwise] = {
    "gelu": gelu_values,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "silu": F.silu,
}
_GATES: dict[str, Elementwise] = {
    "glu": torch.sigmoid,
    "geglu": _PLAIN["gelu"],
    "qgeglu": _PLAIN["qgelu"],
    "reglu": _PLAIN["relu"],
    "sreglu": _PLAIN["srelu"],
    "swiglu": _PLAIN["silu"],
}


def _gated(gate: Elementwise) -> Elementwise:
    def values(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return gate(first) * second

    return values


def _gradient(values: Elementwise, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(values(x), x, grad)
    return found


def _finished(y: torch.Tensor, dtype: torch.dtype, quantizer: Any) -> Any:
    if quantizer is None:
        return y.to(dtype)
    return quantize(y if kind_of(quantizer) in _FUSED else y.to(dtype), quantizer)


def _functions(name: str, values: Elementwise) -> dict[str, Callable[..., Any]]:
    """Return an activation, its gradient, and its gradient with that of a bias, by their names in the extension."""

    def forward(x: torch.Tensor, quantizer: Any) -> Any:
        return _finished(values(x.detach().float()), x.dtype, quantizer)

    def backward(grad: torch.Tensor, x: torch.Tensor, quantizer: Any) -> Any:
        return _finished(_gradient(values, grad.float(), x.detach().float()), x.dtype, quantizer)

    def backward_with_bias(grad: torch.Tensor, x: torch.Tensor, quantizer: Any) -> list[Any]:
        found = _gradient(values, grad.float(), x.detach().float())
        return [found.reshape(-1, found.shape[-1]).sum(0).to(x.dtype), _finished(found, x.dtype, quantizer)]

    return {name: forward, f"d{name}": backward, f"dbias_d{name}": backward_with_bias}


FUNCTIONS: dict[str, Callable[..., Any]] = {}
for _name, _values in {**_PLAIN, **{name: _gated(gate) for name, gate in _GATES.items()}}.items():
    FUNCTIONS |= _functions(_name, _values)
