"""Updates of delayed scales: when they are renewed, and over which ranks their amaxes are reduced.

- Input and weight: after each forward pass of this stage's transformer block, if gradients are enabled.
- Gradient of the output: after the backward pass of the layer that ran first, which ends that of the block.

Both reduce the amaxes of all layers at once, the maximum over Megatron's amax reduction group: the tensor-, data- and
context-parallel ranks, or without the data-parallel ones under `tp_only_amax_red`. A pipeline's stages renew their own.

Source: Transformer Engine 2.20 pytorch/quantization.py:668-782, pytorch/module/linear.py:320-327.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bridge.megatron.emulation.linear import EmulatedLinear
    from bridge.numerics import DelayedScaling

__all__ = ["DelayedUpdates"]


class DelayedUpdates:
    """Renews the scales of one transformer block."""

    def __init__(self, block: torch.nn.Module, layers: Sequence[EmulatedLinear], *, tp_only: bool) -> None:
        """Hook into the forward pass of a chunk's block and into its emulated layers, all with delayed scaling.

        Args:
            block: Megatron's `TransformerBlock`.
            layers: Its emulated layers.
            tp_only: Reduce over the tensor- and context-parallel ranks alone.
        """
        self.states: list[DelayedScaling] = []
        for layer in layers:
            if layer.fp8_state is not None:
                self.states.append(layer.fp8_state)
                layer.updates = self
        self._group = parallel_state.get_amax_reduction_group(with_context_parallel=True, tp_only_amax_red=tp_only)
        self._first: EmulatedLinear | None = None
        block.register_forward_hook(self._after_forward)

    def after_backward_of(self, layer: EmulatedLinear) -> Callable[[], None] | None:
        """Return the callback for the end of a layer's backward pass; the layer that asks first is the last."""
        if self._first is None:
            self._first = layer
        return partial(self._update, "backward") if self._first is layer else None

    def reduce_pending(self) -> None:
        """Max the amaxes not yet used over the group, as the next update would: then all ranks hold equal states."""
        for which in ("forward", "backward"):
            for state, amaxes in zip(self.states, self._reduced(which), strict=True):
                state.merge_pending(which, amaxes)

    def _after_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._update("forward")

    def _update(self, which: str) -> None:
        for state, amaxes in zip(self.states, self._reduced(which), strict=True):
            state.update(which, reduced_amax=amaxes)

    def _reduced(self, which: str) -> list[torch.Tensor]:
        """Return every layer's pending amaxes, the largest of all ranks."""
        amaxes = torch.stack([state.pending(which) for state in self.states])
        if self._group.size() > 1:
            torch.distributed.all_reduce(amaxes, op=torch.distributed.ReduceOp.MAX, group=self._group)
        return list(amaxes)
