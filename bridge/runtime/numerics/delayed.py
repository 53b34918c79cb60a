"""Delayed scaling: the scale of a step comes from the amaxes of earlier steps.

A quantiser that knows its scale beforehand reads the tensor once. So each operand has a history of
amaxes. A step quantises with the stored scale, and entry 0 becomes the maximum of itself and the
step's amax. Between steps `update_scaling_factors` computes:

    last    = amax of this step, reduced over the ranks where there are several
    history = roll left by one, `last` at the end, 0 at entry 0
    amax    = max(last, history) or last, by `amax_compute_algo`
    scale   = (format_max * 2^-margin) / amax    one true division; FP32's maximum on overflow

with three rules that make it stable:

- an amax of 0 (the operand did not run, or was all zeros) changes neither scale nor history;
- an infinite amax enters the history but keeps the scale, under `max` until it has left the
  history again;
- NaN never enters: the amax ignores it.

The first step quantises with scale 1, without calibration.

Source: Transformer Engine 2.20 common/recipe/delayed_scaling.cu:162-253 (the fused update, its
default).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch

from bridge.runtime.numerics.scaling import FP32_MAX
from bridge.runtime.numerics.spec import GemmPrecision

OPERAND_SLOTS = {"input": 0, "weight": 1, "grad_output": 2}
"""Column of each operand in scale and amax_history."""

PASS_SLOTS = {"forward": slice(0, 2), "backward": slice(2, 3)}
"""Columns that are updated together: at the end of the forward pass, and of the backward pass."""


def update_scaling_factors(
    amax_history: torch.Tensor,
    scale: torch.Tensor,
    maximum: torch.Tensor,
    *,
    algo: str = "max",
    reduced_amax: torch.Tensor | None = None,
) -> None:
    """Roll histories and renew scales, in place.

    Args:
        amax_history: (length, n) FP32. Entry 0 has the amaxes since the last update.
        scale: (n,) FP32.
        maximum: (n,) FP32, format_max * 2^-margin of each column.
        algo: max or most_recent.
        reduced_amax: (n,) FP32, the amaxes since the last update, reduced over ranks. Entry 0 of the
            history is taken where a value is 0.
    """
    last = amax_history[0].clone()
    if reduced_amax is not None:
        last = torch.where(reduced_amax != 0, reduced_amax, last)
    has_run = last != 0
    amax = last
    if algo != "most_recent" and len(amax_history) > 1:
        earlier = amax_history[1:].nan_to_num(nan=0.0, posinf=float("inf"))
        amax = torch.maximum(earlier.amax(0), last)
    rolled = torch.cat([torch.zeros_like(last)[None], amax_history[2:], last[None]])
    rolled = rolled[: len(amax_history)]
    amax_history.copy_(torch.where(has_run, rolled, amax_history))
    renewed = torch.div(maximum, amax).clamp_(max=FP32_MAX)
    scale.copy_(torch.where(has_run & amax.isfinite() & (amax > 0), renewed, scale))


def update_layers_together(
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    maximum: float,
    *,
    algo: str,
    reduced_amax: torch.Tensor | None = None,
) -> None:
    """Update several layers at once with `update_scaling_factors`.

    All histories have the same length.
    """
    history = torch.cat(list(histories), dim=1)
    scale = torch.cat(list(scales))
    maximums = torch.full_like(scale, maximum)
    update_scaling_factors(history, scale, maximums, algo=algo, reduced_amax=reduced_amax)
    widths = [len(of_layer) for of_layer in scales]
    torch._foreach_copy_(list(histories), list(torch.split(history, widths, dim=1)))
    torch._foreach_copy_(list(scales), list(torch.split(scale, widths)))


class DelayedScaling(torch.nn.Module):
    """Scales and amax histories of a linear layer's input, weight and grad_output.

    Buffers (saved in checkpoints, always FP32, whatever the module is converted to):
        scale: (3,)
        amax_history: (history length, 3)
        stored_scale: (), the scale of a weight that is stored as codes. It is the scale at the last
            quantisation: a skipped step renews `scale` and leaves the codes as they are.

    The owner calls `update("forward")` once after the forward passes that belong together, and
    `update("backward")` after the backward pass. With several ranks it reduces `pending("forward")`
    first, and calls `update_all` with the result.
    """

    scale: torch.Tensor
    amax_history: torch.Tensor
    stored_scale: torch.Tensor

    def __init__(self, precision: GemmPrecision, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.precision = precision
        kind: dict[str, Any] = {"dtype": torch.float32, "device": device}
        history = torch.zeros(precision.amax_history_len, len(OPERAND_SLOTS), **kind)
        self.register_buffer("scale", torch.ones(len(OPERAND_SLOTS), **kind))
        self.register_buffer("amax_history", history)
        self.register_buffer("stored_scale", torch.ones((), **kind))
        self._stashed: torch.Tensor | None = None
        """Scales that replace `scale` inside `using`."""

    def get_scale(self, operand: str) -> float:
        """Return the scale that an operand is quantised with now."""
        scales = self.scale
        if self._stashed is not None:
            scales = self._stashed
        return scales[OPERAND_SLOTS[operand]].item()

    def record(self, operand: str, amax: float) -> None:
        """Max an amax into entry 0 of the operand's history.

        NaN is ignored, and so is every amax inside `using`.
        """
        if self._stashed is None:
            entry = self.amax_history[0, OPERAND_SLOTS[operand]]
            if amax > entry.item():
                entry.fill_(amax)

    def record_stored_scale(self) -> None:
        """Record the present scale of the weight as that of its stored codes, except in `using`."""
        if self._stashed is None:
            self.stored_scale.copy_(self.scale[OPERAND_SLOTS["weight"]])

    @contextmanager
    def use_stored_scale(self) -> Iterator[None]:
        """Quantise the weight with the scale of its stored codes, and record no amaxes."""
        scales = self.copy_scales()
        scales[OPERAND_SLOTS["weight"]] = self.stored_scale
        with self.use_scales(scales):
            yield

    def get_pending_amaxes(self, which: str) -> torch.Tensor:
        """Return a copy of the amaxes that the next update of "forward" or "backward" will read."""
        return self.amax_history[0, PASS_SLOTS[which]].clone()

    def merge_pending_amaxes(self, which: str, amaxes: torch.Tensor) -> None:
        """Max amaxes of other ranks into those that the next update of a pass will read."""
        pending = self.amax_history[0, PASS_SLOTS[which]]
        torch.maximum(pending, amaxes, out=pending)

    def update(self, which: str) -> None:
        """Roll the histories and renew the scales of a pass.

        "forward" has input and weight, "backward" has grad_output.
        """
        self.update_all([self], which)

    @staticmethod
    def update_all(
        states: "Sequence[DelayedScaling]", which: str, reduced_amax: torch.Tensor | None = None
    ) -> None:
        """Update layers that have the same precision.

        Args:
            states: The layers' states.
            which: forward or backward.
            reduced_amax: The pending amaxes of all layers, one after the other, reduced over ranks.
        """
        columns, precision = PASS_SLOTS[which], states[0].precision
        (largest,) = {precision.spec(name).element.max for name in list(OPERAND_SLOTS)[columns]}
        maximum = largest * 2.0**-precision.margin
        histories = [state.amax_history[:, columns] for state in states]
        scales = [state.scale[columns] for state in states]
        algo = precision.amax_compute_algo
        update_layers_together(histories, scales, maximum, algo=algo, reduced_amax=reduced_amax)

    def copy_scales(self) -> torch.Tensor:
        """Return a copy of the scales, for a later recomputation of this forward pass."""
        return self.scale.clone()

    @contextmanager
    def use_scales(self, stashed: torch.Tensor) -> Iterator[None]:
        """Quantise with stashed scales and record no amaxes, in a ``with`` block.

        A recomputed forward pass has to repeat the values of the first.
        """
        self._stashed = stashed
        try:
            yield
        finally:
            self._stashed = None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move the buffers to another device with the module, and keep them in FP32.

        A scale that is rounded to BF16 is another scale.
        """

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            if result.dtype != tensor.dtype:
                return tensor.to(result.device)
            return result

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stashed": None}
