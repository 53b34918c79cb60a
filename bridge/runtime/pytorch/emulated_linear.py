"""`EmulatedLinear`: a linear layer of a plain PyTorch model in any scheme, emulated on any device."""

from __future__ import annotations

from functools import partial

import torch

from bridge.runtime.numerics.delayed import DelayedScaling
from bridge.runtime.numerics.linear import LinearCall, scaled_linear
from bridge.runtime.numerics.spec import GemmPrecision


class EmulatedLinear(torch.nn.Linear):
    """`nn.Linear` whose three GEMMs run in low precision, with the replaced layer's parameters."""

    precision: GemmPrecision
    scaling: DelayedScaling | None
    """Scales and histories of delayed scaling. None: another scheme."""

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, precision: GemmPrecision) -> EmulatedLinear:
        """Return an emulated layer with the parameters of a linear layer, which share their memory."""
        # The constructor allocates and initialises a weight. The smallest weight costs nothing. It
        # is replaced below.
        layer = cls(1, 1, bias=False)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.precision = precision
        layer.scaling = None
        if precision.scheme == "delayed":
            layer.scaling = DelayedScaling(precision, device=linear.weight.device)
        return layer.train(linear.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        """Return x w^T + bias in the dtype of the input, or in autocast's.

        Delayed scales are renewed after the forward pass and after the backward pass of this layer.
        A pass without gradients renews no scales.

        Args:
            input: (..., K) FP32, BF16 or FP16.

        Returns:
            (..., N).
        """
        renewed_scaling = None
        if self.training and torch.is_grad_enabled():
            renewed_scaling = self.scaling
        after_backward = None
        if renewed_scaling is not None:
            after_backward = partial(renewed_scaling.update, "backward")
        call = LinearCall(
            precision=self.precision, state=self.scaling, after_backward=after_backward
        )
        result = scaled_linear(input, self.weight, self.bias, call=call)
        if renewed_scaling is not None:
            renewed_scaling.update("forward")
        return result
