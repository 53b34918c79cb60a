"""Linear layers of a plain PyTorch model in any scheme of a recipe, emulated on any device."""

from __future__ import annotations

from functools import partial

import torch

from bridge.runtime.numerics.delayed import DelayedScaling
from bridge.runtime.numerics.linear import scaled_linear
from bridge.runtime.numerics.spec import GemmPrecision


class EmulatedLinear(torch.nn.Linear):
    """`nn.Linear` whose three GEMMs run in low precision, with the replaced layer's parameters."""

    precision: GemmPrecision
    scaling: DelayedScaling | None

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, precision: GemmPrecision) -> EmulatedLinear:
        """Return the layer with the parameters of `linear`."""
        layer = cls(1, 1, bias=False)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.precision = precision
        layer.scaling = None
        if precision.scheme == "delayed":
            layer.scaling = DelayedScaling(precision, device=linear.weight.device)
        return layer.train(linear.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        """Return x w^T + bias, (..., N) in the dtype of the input, or in autocast's."""
        renewed = None  # a pass without gradients renews no scales
        if self.training and torch.is_grad_enabled():
            renewed = self.scaling
        after_backward = None
        if renewed is not None:
            after_backward = partial(renewed.update, "backward")
        result = scaled_linear(
            input,
            self.weight,
            self.bias,
            precision=self.precision,
            state=self.scaling,
            after_backward=after_backward,
        )
        if renewed is not None:
            renewed.update("forward")
        return result
