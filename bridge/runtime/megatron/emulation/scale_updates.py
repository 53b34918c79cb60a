"""`DelayedUpdates`: renews delayed scales in Megatron's passes, over ranks and under recomputation.

A region is a part of the model that Megatron runs in one FP8 context (`fp8_regions.py`).

- The scales of input and weight are renewed after each forward pass of a region, if gradients are
  enabled.
- The scale of the output's gradient is renewed after the backward pass of the layer that ran first
  in the region: the backward pass of the region ends with this layer.

The end of a region renews the scales of all layers of this process, as in Transformer Engine. A
layer that did not run in the region has an amax of 0, which changes neither its scale nor its
history.

The amaxes of all layers are reduced in one collective: the maximum over Megatron's amax reduction
group. The group has the tensor-, data- and context-parallel ranks, and no data-parallel ranks under
`tp_only_amax_red`. Each stage of a pipeline reduces the amaxes of its layers.

Under activation recomputation the second forward pass has to quantise with the scales of the first
pass, which may have been renewed in between. So the first pass of a recomputed region stashes the
scales of each layer in the order in which the layers run, and the second pass takes them in this
order. The amaxes of the second pass equal the amaxes of the first pass, and are not recorded again.
The other schemes compute their scales from the tensor, and stash nothing. Megatron recomputes
regions with FP8 or FP4 through Transformer Engine's `te_checkpoint`. Without Transformer Engine
`checkpoint_region` replaces it.

Source: Transformer Engine 2.20 pytorch/quantization.py:668-843, pytorch/module/linear.py:320-327.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state, tensor_parallel

from bridge.runtime.numerics import DelayedScaling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from bridge.runtime.megatron.emulation.parallel_linear import EmulatedParallelLinear


class DelayedUpdates:
    """Renews the scales of a model chunk."""

    def __init__(
        self,
        regions: Sequence[torch.nn.Module],
        layers: Sequence[EmulatedParallelLinear],
        *,
        tp_only: bool,
    ) -> None:
        """Hook into the forward passes of a chunk's regions.

        Args:
            regions: Parts of the chunk that Megatron runs in one FP8 context each.
            layers: The emulated layers in them.
            tp_only: Whether data-parallel ranks are left out of reductions.
        """
        self.states: list[DelayedScaling] = []
        """States of the layers under delayed scaling, in the order of the layers."""
        for layer in layers:
            if layer.fp8_state is not None:
                self.states.append(layer.fp8_state)
                layer.updates = self
        self._group = parallel_state.get_amax_reduction_group(
            with_context_parallel=True, tp_only_amax_red=tp_only
        )
        self._first_layer: dict[torch.nn.Module, EmulatedParallelLinear] = {}
        """Region -> the layer that runs first in it."""
        self._layers = layers
        self._region_of: dict[torch.nn.Module, torch.nn.Module] = {}
        for region in regions:
            for module in region.modules():
                self._region_of[module] = region
        self._hooks = [region.register_forward_hook(self._after_forward) for region in regions]

    def detach(self) -> None:
        """Remove the hooks from the regions and their layers."""
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers:
            layer.updates = None

    def register_for_backward(self, layer: EmulatedParallelLinear) -> Callable[[], None] | None:
        """Register a layer that runs now, and return the callback for its backward pass.

        The layer that runs first in a region is the last layer of the region's backward pass. Only
        this layer gets a callback; the result is None for the other layers.
        """
        region = self._region_of[layer]  # type: ignore[index]  # a module of Megatron's class, mixed in
        first = self._first_layer.setdefault(region, layer)
        if first is not layer:
            return None
        return partial(self._update, "backward")

    def reduce_pending(self) -> None:
        """Reduce the pending amaxes over the group, as the next update would.

        This is a collective call. Afterwards the states of all ranks are equal, so that a
        checkpoint may keep one of them.
        """
        for pass_name in ("forward", "backward"):
            for state, amaxes in zip(self.states, self._reduce_amaxes(pass_name), strict=True):
                state.merge_pending_amaxes(pass_name, amaxes)

    def _after_forward(self, *_: Any) -> None:
        """Renew the scales of input and weight, if gradients are enabled. It is a hook of torch."""
        if torch.is_grad_enabled():
            self._update("forward")

    def _update(self, pass_name: str) -> None:
        """Renew the scales of a pass from the amaxes of all ranks in a collective call."""
        DelayedScaling.update_all(self.states, pass_name, self._reduce_amaxes(pass_name).flatten())

    def _reduce_amaxes(self, pass_name: str) -> torch.Tensor:
        """Return the pending amaxes, each the maximum over the ranks.

        This is a collective call.
        The result has a row per layer and a column per operand of the pass, in FP32.
        """
        layer_amaxes = [state.get_pending_amaxes(pass_name) for state in self.states]
        amaxes = torch.stack(layer_amaxes)
        if self._group.size() > 1:
            torch.distributed.all_reduce(
                amaxes, op=torch.distributed.ReduceOp.MAX, group=self._group
            )
        return amaxes


@dataclass(frozen=True, kw_only=True, slots=True)
class _RegionPass:
    """A forward pass of a recomputed region."""

    scales: deque[torch.Tensor]
    """Scales of the region's layers in the first pass, in the order in which the layers run."""
    is_recomputation: bool


_CURRENT_PASS: ContextVar[_RegionPass | None] = ContextVar(
    "pass of a recomputed region", default=None
)
"""The pass that runs. None: no recomputed region runs."""


def use_pass_scales(state: DelayedScaling | None) -> AbstractContextManager[None]:
    """Let a layer quantise with the scales of this pass, in a ``with`` block.

    A recomputation takes the scales of the first pass. Any other pass takes the present scales.
    """
    running = _CURRENT_PASS.get()
    if running is None or state is None:
        return nullcontext()
    if running.is_recomputation:
        return state.use_scales(running.scales.popleft())
    running.scales.append(state.copy_scales())
    return nullcontext()


def checkpoint_region(
    forward: Callable[..., Any],
    is_distributed: bool,
    _rng_tracker: Any,
    _tp_group: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a region now, and once more in the backward pass, with the scales of the first pass.

    The signature is the same as of Megatron's `te_checkpoint`. Megatron's
    `tensor_parallel.checkpoint`, which recomputes the region, restores the random states, so that
    tracker and group are not needed.

    Args:
        forward: The region.
        is_distributed: Whether the input is kept in parts over the tensor-parallel ranks.
        *args: Tensors, and other positional arguments of the region.
        **kwargs: Keyword arguments of the region.
    """
    scales: deque[torch.Tensor] = deque()
    pass_numbers = count()

    def run_pass(*tensors: Any) -> Any:
        is_recomputation = next(pass_numbers) > 0
        token = _CURRENT_PASS.set(_RegionPass(scales=scales, is_recomputation=is_recomputation))
        try:
            return forward(*tensors, **kwargs)
        finally:
            _CURRENT_PASS.reset(token)

    return tensor_parallel.checkpoint(run_pass, is_distributed, *args)
