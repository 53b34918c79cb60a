"""Comparison of the GEMMs of a model's linear layers between two passes over the same batch.

`capture_linear_results` keeps the results of a forward and a backward pass, and
`compute_relative_errors` compares two of them. The results are read by hooks on tensors, so that
the layers may be Megatron's, Transformer Engine's or emulated. A sample of each result is kept, at fixed places, in FP32 on the CPU. The
results of the first micro-batch count; weight gradients are the sum over micro-batches.

Experts have different numbers of tokens, and FP8 adds rows of zeros to them, so that the first
elements of an expert's results are kept. `RouterReplays` gives the experts of two passes the same tokens.
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

from bridge.runtime.compare.band import GemmLocation
from bridge.runtime.megatron.patching import Patch, apply_patches
from bridge.runtime.megatron.record.telemetry import name_modules_by_layer

MAX_SAMPLED_VALUES = 2**16
"""Least number of elements that a sample of a larger result has, at even distances."""

CapturedResults = dict[GemmLocation, torch.Tensor]


@contextmanager
def capture_linear_results(
    model: Sequence[torch.nn.Module], *, loss_scale: float = 1.0
) -> Iterator[CapturedResults]:
    """Capture samples of the results of linear layers in transformer layers, in a ``with`` block.

    The results are in the order of execution. The gradient of a weight follows that of the layer's
    input.
    """
    captured: CapturedResults = {}
    linears: dict[Any, tuple[int, str]] = {}
    for module, where in name_modules_by_layer(model).items():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.nn.Parameter) and weight.ndim == 2:
            linears[module] = where
    with ExitStack() as hooks:
        for module, where in linears.items():
            hook = partial(_capture_forward, where, captured, loss_scale)
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
            _capture_sample(captured, where, "wgrad", gradients.pop(where), loss_scale)
    for where, gradient in gradients.items():
        _capture_sample(captured, where, "wgrad", gradient, loss_scale)


def _capture_forward(
    where: tuple[int, str],
    captured: CapturedResults,
    loss_scale: float,
    _module: Any,
    inputs: tuple[Any, ...],
    output: Any,
) -> None:
    """Keep a layer's output and the gradient of its input; a hook of torch.

    Under recomputation the second pass has the gradient of the input.
    """
    if isinstance(output, tuple):
        output = output[0]
    _capture_sample(captured, where, "fprop", output)
    if inputs[0].requires_grad:
        inputs[0].register_hook(
            lambda gradient: _capture_sample(captured, where, "dgrad", gradient, loss_scale)
        )


def _capture_sample(
    captured: CapturedResults,
    where: tuple[int, str],
    gemm: str,
    result: torch.Tensor | None,
    scale: float = 1.0,
) -> None:
    """Keep a sample of a result, divided by a scale, if it is the first result of its place."""
    layer, module = where
    place = GemmLocation(layer=layer, module=module, gemm=gemm)
    if result is None or place in captured:
        return
    if "experts" in module.split("."):
        result = result.reshape(-1)[:MAX_SAMPLED_VALUES]
    captured[place] = sample_tensor(result) / scale


def sample_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return elements at even distances, in FP32 on the CPU."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // MAX_SAMPLED_VALUES)].float().cpu()


def compute_relative_errors(
    first: CapturedResults, second: CapturedResults
) -> dict[GemmLocation, float]:
    """Return |a - b| / |a| of each place that both have, in the order of the first."""
    errors = {}
    for place, result in first.items():
        if place in second:
            padded = pad_sequence([result, second[place]])
            errors[place] = compute_relative_error(*padded.T)
    return errors


def compute_relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return |a - b| / |a| in Frobenius norms.

    It is 0 if both are zero, infinite if a alone is zero, and not finite if an element is not.
    """
    difference = float(torch.linalg.vector_norm(a.double() - b.double()))
    norm = float(torch.linalg.vector_norm(a.double()))
    if norm:
        return difference / norm
    if difference:
        return math.inf
    return 0.0


_TopkFunction = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(kw_only=True)
class _RouterReplay:
    """The choices of a router, call after call, as an object of Megatron's `router_replay`."""

    chosen: list[torch.Tensor] = field(default_factory=list)
    """Experts of each call of the first pass, (tokens, topk)."""
    calls: int | None = None
    """Calls of this pass so far, None in the first pass, which chooses."""
    tokens: int = 0
    """Tokens of the last pass."""
    rerouted: int = 0
    """Tokens of the last pass whose scores would choose other experts."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: _TopkFunction,
        **_named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and experts: those that the first pass chose.

        Megatron calls it in place of its choice of experts. The arguments are Megatron's.
        """
        values, preferred = default_compute_topk(
            scores, topk, num_groups=num_groups, group_topk=group_topk
        )
        if self.calls is None:
            self.chosen.append(preferred)
            return values, preferred
        experts = self.chosen[self.calls]
        self.calls += 1
        self.tokens += len(preferred)
        is_rerouted = (preferred.sort().values != experts.sort().values).any(-1)
        self.rerouted += int(is_rerouted.sum())
        return scores.gather(1, experts), experts


class RouterReplays:
    """The experts that the routers of a model choose in the first pass; later passes follow them.

    Nearly equal scores have another order in another precision, and an expert then multiplies other
    tokens. With equal routes the results of every GEMM are of the same tokens. Megatron asks the
    object at a router's `router_replay` for the experts of each call
    (transformer/moe/moe_utils.py, topk_routing_with_score_function).
    """

    def __init__(self) -> None:
        self._routes: dict[tuple[int, str], _RouterReplay] = {}

    @contextmanager
    def follow(self, model: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Let the routers of a model follow these routes in a ``with`` block, which is a pass.

        In the first pass the routers choose the routes.
        """
        is_first = not self._routes
        changes: list[Patch] = []
        for module, where in name_modules_by_layer(model).items():
            if isinstance(module, TopKRouter):
                route = self._routes.setdefault(where, _RouterReplay())
                route.tokens = 0
                route.rerouted = 0
                route.calls = 0
                if is_first:
                    route.calls = None
                changes.append((module, "router_replay", route))
        with apply_patches(changes):
            yield

    @property
    def rerouted(self) -> float | None:
        """Share of the last pass's tokens whose scores would choose other experts.

        It is None for a model without routers.
        """
        tokens = sum(route.tokens for route in self._routes.values())
        rerouted = sum(route.rerouted for route in self._routes.values())
        if not tokens:
            return None
        return rerouted / tokens
