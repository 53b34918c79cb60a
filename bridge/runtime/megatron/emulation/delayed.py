"""Delayed scaling in Megatron's passes: when scales are renewed, over which ranks, and recomputation between the two.

- Input and weight: after each forward pass of a region, if gradients are enabled.
- Gradient of the output: after the backward pass of the region's layer that ran first, which ends that of the region.

A region is a part of the model that Megatron runs in one FP8 context: the transformer block of this stage; in a
multi-token-prediction layer, the projection and the transformer layer. The end of each renews the scales of all layers
of this process, as Transformer Engine does: a layer that did not run in it keeps its scale, and its history moves on.

Both reduce the amaxes of all layers at once, the maximum over Megatron's amax reduction group: the tensor-, data- and
context-parallel ranks, or without the data-parallel ones under `tp_only_amax_red`. A pipeline's stages renew their own.

Under activation recomputation the second forward pass quantises with the scales of the first, which may have been
renewed in between. So the first pass of a recomputed region stashes each layer's scales in the order in which the
layers run, and the second takes them from there; its amaxes are not recorded, since they are those of the first. All
other schemes compute their scales from the tensor itself and need nothing. Megatron sends regions with FP8 or FP4 to
Transformer Engine's `te_checkpoint`, which is not there without it. `checkpoint` stands in for it.

Source: Transformer Engine 2.20 pytorch/quantization.py:668-843, pytorch/module/linear.py:320-327.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state, tensor_parallel

from bridge.runtime.numerics import DelayedScaling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from bridge.runtime.megatron.emulation.linear import EmulatedLinear


class DelayedUpdates:
    """Renews the scales of one model chunk."""

    def __init__(
        self, regions: Sequence[torch.nn.Module], layers: Sequence[EmulatedLinear], *, tp_only: bool
    ) -> None:
        """Hook into the forward passes of a chunk's regions; `tp_only` leaves data-parallel ranks out of reductions."""
        self.states: list[DelayedScaling] = []
        for layer in layers:
            if layer.fp8_state is not None:
                self.states.append(layer.fp8_state)
                layer.updates = self
        self._group = parallel_state.get_amax_reduction_group(
            with_context_parallel=True, tp_only_amax_red=tp_only
        )
        self._firsts: dict[torch.nn.Module, EmulatedLinear] = {}
        self._layers = layers
        self._region_of = {module: region for region in regions for module in region.modules()}
        self._hooks = [region.register_forward_hook(self._after_forward) for region in regions]

    def detach(self) -> None:
        """Leave the regions and their layers."""
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers:
            layer.updates = None

    def after_backward_of(self, layer: EmulatedLinear) -> Callable[[], None] | None:
        """Return the callback for the end of a layer's backward pass; a region's first layer to ask is its last."""
        region = self._region_of[layer]  # type: ignore[index]  # a module of Megatron's class, mixed in
        return (
            partial(self._update, "backward")
            if self._firsts.setdefault(region, layer) is layer
            else None
        )

    def reduce_pending(self) -> None:
        """Max the amaxes not yet used over the group, as the next update would: then all ranks hold equal states."""
        for which in ("forward", "backward"):
            for state, amaxes in zip(self.states, self._reduced(which), strict=True):
                state.merge_pending(which, amaxes)

    def _after_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._update("forward")

    def _update(self, which: str) -> None:
        DelayedScaling.update_all(self.states, which, self._reduced(which).flatten())

    def _reduced(self, which: str) -> torch.Tensor:
        """Return every layer's pending amaxes, one row each, the largest of all ranks."""
        amaxes = torch.stack([state.pending(which) for state in self.states])
        if self._group.size() > 1:
            torch.distributed.all_reduce(
                amaxes, op=torch.distributed.ReduceOp.MAX, group=self._group
            )
        return amaxes


_REGION: ContextVar[tuple[deque[torch.Tensor], bool] | None] = ContextVar(
    "recomputed region", default=None
)
"""The scales that the first pass of a region went in with, and whether it is recomputed now."""


def scales_of_this_pass(state: DelayedScaling | None) -> AbstractContextManager[None]:
    """Quantise with the scales that belong to this pass, which are the current ones outside a recomputation."""
    running = _REGION.get()
    if running is None or state is None:
        return nullcontext()
    scales, recomputes = running
    if recomputes:
        return state.using(scales.popleft())
    scales.append(state.stash())
    return nullcontext()


def checkpoint(
    forward: Callable[..., Any],
    is_distributed: bool,
    _rng_tracker: Any,
    _tp_group: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a function now and again in the backward pass, with the call signature of Megatron's `te_checkpoint`.

    Megatron's own checkpoint, which takes its place, knows the random states and the group.
    """
    scales, passes = deque[torch.Tensor](), count()

    def run(*tensors: Any) -> Any:
        token = _REGION.set((scales, next(passes) > 0))
        try:
            return forward(*tensors, **kwargs)
        finally:
            _REGION.reset(token)

    return tensor_parallel.checkpoint(run, is_distributed, *args)
