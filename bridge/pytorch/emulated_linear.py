"""Linear layers of a plain PyTorch model in any scheme of a recipe, emulated on whatever device there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bridge.errors import PrecisionTypeError
from bridge.numerics.delayed import DelayedScaling
from bridge.numerics.linear import scaled_linear
from bridge.numerics.spec import GemmPrecision

if TYPE_CHECKING:
    from collections.abc import Collection

    from bridge.registry.config import MixedPrecisionConfig

__all__ = ["EmulatedLinear", "emulate"]


class EmulatedLinear(torch.nn.Linear):
    """`nn.Linear` whose three GEMMs run in low precision; weight and bias are the replaced layer's own."""

    precision: GemmPrecision
    scaling: DelayedScaling | None

    @classmethod
    def of(cls, linear: torch.nn.Linear, precision: GemmPrecision) -> EmulatedLinear:
        """Return the layer with the parameters of `linear`."""
        layer = cls(1, 1, bias=False)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.precision = precision
        layer.scaling = None
        if precision.scheme == "delayed":
            layer.scaling = DelayedScaling(precision, device=linear.weight.device)
        layer.train(linear.training)
        return layer

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        """Return x w^T + bias, (..., N) in the dtype of the input, or in autocast's."""
        state = self.scaling
        update = self.training and torch.is_grad_enabled() and state is not None
        result = scaled_linear(
            input,
            self.weight,
            self.bias,
            precision=self.precision,
            state=state,
            after_backward=(lambda: state.update("backward")) if update and state is not None else None,
        )
        if update and state is not None:
            state.update("forward")
        return result


def emulate(model: torch.nn.Module, config: MixedPrecisionConfig, *, skip: Collection[str] = ()) -> list[str]:
    """Replace the `nn.Linear` modules of `model` in place; see `bridge.pytorch.emulate_linears`."""
    scheme, format_ = (config.fp8_recipe, config.fp8) if config.fp8 else (config.fp4_recipe, config.fp4)
    precision = GemmPrecision(
        scheme=scheme,
        format=str(format_),
        margin=config.fp8_margin if scheme == "delayed" else 0,
        amax_history_len=config.fp8_amax_history_len,
        amax_compute_algo=config.fp8_amax_compute_algo,
    )
    linears = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    if any(isinstance(module, EmulatedLinear) for module in model.modules()):
        raise PrecisionTypeError(
            "model: must not be emulated already, got a model with EmulatedLinear layers. Convert a fresh one, once."
        )
    if not linears or linears == [""]:
        what = type(model).__name__
        rule = "must contain nn.Linear modules to replace"
        raise PrecisionTypeError(f"model: {rule}, got a bare {what}. Wrap a single layer in nn.Sequential.")
    for name in skip:
        if name not in linears:
            raise PrecisionTypeError(
                f"skip: must name nn.Linear modules of the model, got {name!r}. Take names from model.named_modules()."
            )
    replaced = []
    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and name and name not in skip:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, EmulatedLinear.of(module, precision))
            replaced.append(name)
    return replaced
