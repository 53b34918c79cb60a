"""`DelayedScaling`: the scale of a step comes from the amaxes of earlier steps.

A quantiser that knows its scale beforehand reads the tensor only once. So each operand has a scale
and a history of amaxes. A step quantises with the stored scale. Entry 0 of the history becomes the
maximum of itself and the step's amax. Between steps `update_scaling_factors` computes:

    last    = amax of this step, the maximum over the ranks
    history = roll left by one, `last` at the end, 0 at entry 0
    amax    = max(last, history) or last, by `amax_compute_algo`
    scale   = (format_max * 2^-margin) / amax    one true division; FP32's maximum on overflow

Three rules make it stable:

- An amax of 0 (the operand did not run, or was all zeros) changes neither scale nor history.
- An infinite amax enters the history and does not change the scale. Under `max` the scale stays
  until the infinite amax has left the history.
- NaN never enters the history: the amax ignores it.

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
"""Name of a pass -> columns that are updated together at its end."""


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
        reduced_amax: (n,) FP32, the amaxes since the last update, each the maximum over the ranks.
            A value of 0 is replaced by entry 0 of the history. None: all are entry 0.
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
    """Update several layers at once, in place, with the same result as an update of each layer.

    Args:
        histories: A history per layer, all of the same length.
        scales: Scales per layer, as many as the history has columns.
        maximum: format_max * 2^-margin.
        algo: max or most_recent.
        reduced_amax: FP32, the amaxes of all layers, one after the other. None: entry 0 of each
            history.
    """
    history = torch.cat(list(histories), dim=1)
    scale = torch.cat(list(scales))
    maximums = torch.full_like(scale, maximum)
    update_scaling_factors(history, scale, maximums, algo=algo, reduced_amax=reduced_amax)
    widths = [len(layer_scales) for layer_scales in scales]
    torch._foreach_copy_(list(histories), list(torch.split(history, widths, dim=1)))
    torch._foreach_copy_(list(scales), list(torch.split(scale, widths)))


class DelayedScaling(torch.nn.Module):
    """Scales and amax histories of a linear layer's input, weight and grad_output.

    The buffers are saved in checkpoints, and stay FP32 whatever dtype the module is converted to.

    The owner calls `update("forward")` once after the forward passes that belong together, and
    `update("backward")` after the backward pass. With several ranks it first takes the maximum of
    `get_pending_amaxes("forward")` over the ranks, and calls `update_all` with the result.
    """

    scale: torch.Tensor
    """(3,) scale of each operand, in the order of `OPERAND_SLOTS`."""
    amax_history: torch.Tensor
    """(history length, 3) amaxes of each operand."""
    stored_scale: torch.Tensor
    """() scale with which a stored weight was quantised last.

    A skipped step renews `scale` and leaves the codes as they are.
    """

    def __init__(self, precision: GemmPrecision, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.precision = precision
        options: dict[str, Any] = {"dtype": torch.float32, "device": device}
        history = torch.zeros(precision.amax_history_len, len(OPERAND_SLOTS), **options)
        self.register_buffer("scale", torch.ones(len(OPERAND_SLOTS), **options))
        self.register_buffer("amax_history", history)
        self.register_buffer("stored_scale", torch.ones((), **options))
        self._stashed: torch.Tensor | None = None
        """Scales that replace `scale` inside a `use_scales` block. None: no such block runs."""

    def get_scale(self, role: str) -> float:
        """Return the scale with which an operand is quantised now."""
        scales = self.scale
        if self._stashed is not None:
            scales = self._stashed
        return scales[OPERAND_SLOTS[role]].item()

    def record(self, role: str, amax: float) -> None:
        """Make entry 0 of an operand's history the maximum of itself and an amax.

        NaN is ignored, and so is every amax inside `use_scales`.
        """
        if self._stashed is None:
            entry = self.amax_history[0, OPERAND_SLOTS[role]]
            if amax > entry.item():
                entry.fill_(amax)

    def record_stored_scale(self) -> None:
        """Record the weight's present scale as the scale of its codes, unless `use_scales` runs."""
        if self._stashed is None:
            self.stored_scale.copy_(self.scale[OPERAND_SLOTS["weight"]])

    @contextmanager
    def use_stored_scale(self) -> Iterator[None]:
        """Quantise the weight with the scale of its stored codes in a ``with`` block.

        No amax is recorded.
        """
        scales = self.copy_scales()
        scales[OPERAND_SLOTS["weight"]] = self.stored_scale
        with self.use_scales(scales):
            yield

    def get_pending_amaxes(self, pass_name: str) -> torch.Tensor:
        """Return a copy of the amaxes that the next update of a pass reads.

        Args:
            pass_name: forward or backward.
        """
        return self.amax_history[0, PASS_SLOTS[pass_name]].clone()

    def merge_pending_amaxes(self, pass_name: str, amaxes: torch.Tensor) -> None:
        """Make the pending amaxes of a pass the maximum over this rank and other ranks."""
        pending = self.amax_history[0, PASS_SLOTS[pass_name]]
        torch.maximum(pending, amaxes, out=pending)

    def update(self, pass_name: str) -> None:
        """Roll the histories and renew the scales of a pass.

        The pass "forward" has input and weight, and "backward" has grad_output.
        """
        self.update_all([self], pass_name)

    @staticmethod
    def update_all(
        states: "Sequence[DelayedScaling]", pass_name: str, reduced_amax: torch.Tensor | None = None
    ) -> None:
        """Update layers that have the same precision.

        Args:
            states: The layers' states.
            pass_name: forward or backward.
            reduced_amax: The pending amaxes of all layers, one after the other, reduced over ranks.
                None: they are not reduced.
        """
        columns, precision = PASS_SLOTS[pass_name], states[0].precision
        operands = list(OPERAND_SLOTS)[columns]
        # All operands of a pass have the same format, and so the same maximum.
        (format_max,) = {precision.spec(operand).element.max for operand in operands}
        maximum = format_max * 2.0**-precision.margin
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

        A recomputed forward pass has to repeat the values of the first forward pass.

        Args:
            stashed: A result of `copy_scales`.
        """
        self._stashed = stashed
        try:
            yield
        finally:
            self._stashed = None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move the buffers to another device with the module, and keep them in FP32.

        torch calls it for `module.to(...)`, `module.bfloat16()` and similar methods. Rounding to
        BF16 would change a scale.
        """

        def apply_without_cast(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            if result.dtype != tensor.dtype:
                return tensor.to(result.device)
            return result

        super()._apply(apply_without_cast, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or pickle, without the scales of a `use_scales` block."""
        return {**self.__dict__, "_stashed": None}
