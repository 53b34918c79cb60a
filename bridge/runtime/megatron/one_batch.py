"""Results of every GEMM of a model's linear layers in one forward and backward pass.

They are compared with those of another pass. `capture` two passes of one batch, then ask
`relative_errors`. Hooks on tensors do it, so that the layers may be Megatron's own, Transformer
Engine's or emulated. A result is sampled at fixed places, in FP32 on the CPU. Of several
micro-batches the first counts, apart from weight gradients, which are summed.

Each expert has a number of tokens of its own, to which FP8 adds rows of zeros, so the first
elements of its results are kept. `Routes` gives the experts of two passes the same tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch.nn.utils.rnn import pad_sequence

from bridge.runtime.compare.band import Place
from bridge.runtime.megatron.record.telemetry import global_layer_names
from bridge.runtime.megatron.replacement import Change, replaced

SAMPLED = 2**16
"""About how many elements of a result are kept: fewer than twice as many, at even distances."""

Captured = dict[Place, torch.Tensor]


@contextmanager
def capture(model: Sequence[torch.nn.Module], *, loss_scale: float = 1.0) -> Iterator[Captured]:
    """Capture the results of linear layers in transformer layers, for a ``with`` block.

    The results are in the order of execution; a weight's gradient comes
    after that of the layer's input.
    """
    captured: Captured = {}
    linears: dict[Any, tuple[int, str]] = {}
    for module, where in global_layer_names(model).items():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.nn.Parameter) and weight.ndim == 2:
            linears[module] = where
    with ExitStack() as hooks:
        for module, where in linears.items():
            hook = partial(_forward_hook, where, captured, loss_scale)
            hooks.callback(module.register_forward_hook(hook).remove)
        yield captured
    gradients: dict[tuple[int, str], torch.Tensor | None] = {}
    for module, where in linears.items():
        gradients[where] = getattr(module.weight, "main_grad", module.weight.grad)
    passed = dict(captured)
    captured.clear()
    for place, result in passed.items():
        captured[place] = result
        if place.gemm == "dgrad":
            where = (place.layer, place.module)
            _keep(captured, where, "wgrad", gradients.pop(where), loss_scale)
    for where, gradient in gradients.items():
        _keep(captured, where, "wgrad", gradient, loss_scale)


def _forward_hook(
    where: tuple[int, str],
    captured: Captured,
    loss_scale: float,
    _module: Any,
    inputs: tuple[Any, ...],
    output: Any,
) -> None:
    """Keep a layer's output, and the gradient of its input.

    Under recomputation the second pass has the gradient of the input.
    """
    if isinstance(output, tuple):
        output = output[0]
    _keep(captured, where, "fprop", output)
    if inputs[0].requires_grad:
        inputs[0].register_hook(
            lambda gradient: _keep(captured, where, "dgrad", gradient, loss_scale)
        )


def _keep(
    captured: Captured,
    where: tuple[int, str],
    gemm: str,
    result: torch.Tensor | None,
    scale: float = 1.0,
) -> None:
    """Keep a sample of a result, if it is the first of its place."""
    layer, module = where
    place = Place(layer=layer, module=module, gemm=gemm)
    if result is None or place in captured:
        return
    if "experts" in module.split("."):
        result = result.reshape(-1)[:SAMPLED]
    captured[place] = sample(result) / scale


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return elements at fixed places, in FP32 on the CPU."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED)].float().cpu()


def relative_errors(first: Captured, second: Captured) -> dict[Place, float]:
    """Return |a - b| / |a| of each result that both have, in the order of the first."""
    errors = {}
    for place, result in first.items():
        if place in second:
            padded = pad_sequence([result, second[place]])
            errors[place] = relative_error(*padded.T)
    return errors


def relative_error(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return |a - b| / |a| in Frobenius norms.

    It is 0 where both are zero, infinite where a alone is, and not finite where a number is not.
    """
    difference = float(torch.linalg.vector_norm(one.double() - other.double()))
    norm = float(torch.linalg.vector_norm(one.double()))
    if norm:
        return difference / norm
    if difference:
        return math.inf
    return 0.0


_Choose = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(kw_only=True)
class _Route:
    """The choices of one router, call after call; the object that Megatron asks."""

    chosen: list[torch.Tensor] = field(default_factory=list)
    taken: int | None = None
    """Calls of this pass; None: this pass chooses."""
    tokens: int = 0
    rerouted: int = 0
    """Those of the last pass for which its own scores name other experts."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: _Choose,
        **_named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values, preferred = default_compute_topk(
            scores, topk, num_groups=num_groups, group_topk=group_topk
        )
        if self.taken is None:
            self.chosen.append(preferred)
            return values, preferred
        experts = self.chosen[self.taken]
        self.taken += 1
        self.tokens += len(preferred)
        is_rerouted = (preferred.sort().values != experts.sort().values).any(-1)
        self.rerouted += int(is_rerouted.sum())
        return scores.gather(1, experts), experts


class Routes:
    """The experts that a model's routers choose.

    The first pass chooses them, and each later one takes them. Two precisions give nearly equal
    scores other orders, and an expert then multiplies other tokens. With the routes of one pass in
    the other the results of every GEMM are of the same tokens. Megatron asks the object at a
    router's `router_replay` for the experts of each call (transformer/moe/moe_utils.py,
    topk_routing_with_score_function).
    """

    def __init__(self) -> None:
        self._of: dict[tuple[int, str], _Route] = {}

    @contextmanager
    def taken(self, model: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Let a model's routers choose, or take what was chosen, for a ``with`` block.

        The block is one pass.
        """
        is_first = not self._of
        changes: list[Change] = []
        for module, where in global_layer_names(model).items():
            if isinstance(module, TopKRouter):
                route = self._of.setdefault(where, _Route())
                route.tokens, route.rerouted = 0, 0
                route.taken = 0
                if is_first:
                    route.taken = None
                changes.append((module, "router_replay", route))
        with replaced(changes):
            yield

    @property
    def rerouted(self) -> float | None:
        """Part of the last pass's tokens for which its own scores name other experts.

        The result is None without routers.
        """
        tokens = sum(route.tokens for route in self._of.values())
        rerouted = sum(route.rerouted for route in self._of.values())
        if not tokens:
            return None
        return rerouted / tokens
