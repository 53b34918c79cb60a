"""Activation recomputation under delayed scaling: the second forward pass quantises with the scales of the first.

Between the two passes the scales may have been renewed. So the first pass of a recomputed region stashes each layer's
scales in the order in which the layers run, and the second takes them from there; its amaxes are not recorded, since
they are those of the first. All other schemes compute their scales from the tensor itself and need nothing.

Megatron sends regions with FP8 or FP4 to Transformer Engine's `te_checkpoint`, which is not there without it.
`checkpoint` stands in for it.

Source: Transformer Engine 2.20 pytorch/quantization.py:784-843.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from megatron.core import tensor_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from bridge.numerics import DelayedScaling

__all__ = ["checkpoint", "scales_of_this_pass"]


class _Region:
    """The scales one run of a recomputed region went in with."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.scales: deque[torch.Tensor] = deque()
        self.has_run = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recomputes, self.has_run = self.has_run, True
        token = _REGION.set((self, recomputes))
        try:
            return self.forward(*args, **kwargs)
        finally:
            _REGION.reset(token)


_REGION: ContextVar[tuple[_Region, bool] | None] = ContextVar("recomputed region", default=None)


@contextmanager
def scales_of_this_pass(state: DelayedScaling) -> Iterator[None]:
    """Quantise with the scales that belong to this pass, which are the current ones outside a recomputation."""
    running = _REGION.get()
    if running is None:
        yield
        return
    region, recomputes = running
    if not recomputes:
        region.scales.append(state.stash())
        yield
        return
    with state.using(region.scales.popleft()):
        yield


def checkpoint(
    forward: Callable[..., Any],
    distribute_saved_activations: bool,
    get_rng_tracker: Callable[[], Any],
    tp_group: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a function now and again in the backward pass, with the call signature of Megatron's `te_checkpoint`."""
    del get_rng_tracker, tp_group  # Megatron's own checkpoint knows both
    region = _Region(forward)
    return tensor_parallel.checkpoint(
        (lambda *tensors: region(*tensors, **kwargs)) if kwargs else region, distribute_saved_activations, *args
    )
