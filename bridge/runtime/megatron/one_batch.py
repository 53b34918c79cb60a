"""Functions that compare the GEMMs of a model's linear layers in two passes over the same batch.

`capture_linear_results` keeps the results of a forward and a backward pass, and
`compute_relative_errors` compares two of them. The results are read by hooks of torch, so that the
layers may be Megatron's, Transformer Engine's or emulated. A sample of each result is kept, at even
distances, in FP32 on the CPU. The results come from the first micro-batch. Weight gradients are the
sum over micro-batches.

An expert has another number of tokens in another precision, since FP8 adds rows of zeros. So the
first elements of an expert's results are kept. `RouterReplays` gives the experts of two passes the
same tokens.
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
"""Size of a sample: a strided sample of a larger result has from one to two times as many elements.

The sample of an expert's result has at most this many.
"""

CapturedResults = dict[GemmLocation, torch.Tensor]
"""GEMM -> sample of its result, (elements,) in FP32 on the CPU."""


@contextmanager
def capture_linear_results(
    model: Sequence[torch.nn.Module], *, loss_scale: float = 1.0
) -> Iterator[CapturedResults]:
    """Capture samples of the results of linear layers in transformer layers, in a ``with`` block.

    Args:
        model: Chunks of this rank.
        loss_scale: Factor of the loss, by which gradients are divided.

    Yields:
        The samples, complete at the end of the block, in the order of execution. The gradient of a
        weight follows the gradient of the layer's input.
    """
    captured: CapturedResults = {}
    linears: dict[Any, tuple[int, str]] = {}
    for module, label in name_modules_by_layer(model).items():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.nn.Parameter) and weight.ndim == 2:
            linears[module] = label
    with ExitStack() as hooks:
        for module, label in linears.items():
            hook = partial(_capture_forward, label, captured, loss_scale)
            hooks.callback(module.register_forward_hook(hook).remove)
        yield captured
    _insert_weight_gradients(captured, linears, loss_scale)


def _insert_weight_gradients(
    captured: CapturedResults, linears: dict[Any, tuple[int, str]], loss_scale: float
) -> None:
    """Insert each weight gradient after the gradient of its layer's input, or at the end."""
    gradients: dict[tuple[int, str], torch.Tensor | None] = {}
    for module, label in linears.items():
        gradients[label] = getattr(module.weight, "main_grad", module.weight.grad)
    without_weights = dict(captured)
    captured.clear()
    for location, result in without_weights.items():
        captured[location] = result
        if location.gemm == "dgrad":
            label = (location.layer, location.module)
            _capture_sample(captured, label, "wgrad", gradients.pop(label), loss_scale)
    for label, gradient in gradients.items():
        _capture_sample(captured, label, "wgrad", gradient, loss_scale)


def _capture_forward(
    label: tuple[int, str],
    captured: CapturedResults,
    loss_scale: float,
    _module: Any,
    inputs: tuple[Any, ...],
    output: Any,
) -> None:
    """Keep a sample of a layer's output, and later of the gradient of its input.

    It is a hook of torch.

    Under recomputation only the second forward pass has an input with a gradient.
    """
    if isinstance(output, tuple):
        output = output[0]
    _capture_sample(captured, label, "fprop", output)
    if inputs[0].requires_grad:
        inputs[0].register_hook(
            lambda gradient: _capture_sample(captured, label, "dgrad", gradient, loss_scale)
        )


def _capture_sample(
    captured: CapturedResults,
    label: tuple[int, str],
    gemm: str,
    result: torch.Tensor | None,
    scale: float = 1.0,
) -> None:
    """Keep a sample of a result, divided by a scale, if it is the first result of its GEMM."""
    layer, module = label
    location = GemmLocation(layer=layer, module=module, gemm=gemm)
    if result is None or location in captured:
        return
    if "experts" in module.split("."):
        result = result.reshape(-1)[:MAX_SAMPLED_VALUES]
    captured[location] = sample_tensor(result) / scale


def sample_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return elements at even distances, in FP32 on the CPU."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // MAX_SAMPLED_VALUES)].float().cpu()


def compute_relative_errors(
    first: CapturedResults, second: CapturedResults
) -> dict[GemmLocation, float]:
    """Return |a - b| / |a| of each GEMM that both passes have, in the order of the first.

    The shorter of two samples is padded with zeros: an expert may have more rows in one precision.
    """
    errors = {}
    for location, result in first.items():
        if location in second:
            padded = pad_sequence([result, second[location]])
            errors[location] = compute_relative_error(*padded.T)
    return errors


def compute_relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return |a - b| / |a| in Frobenius norms.

    It is 0 if both are zero, infinite if only a is zero, and not finite if an element is not
    finite.
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
    """The choices of one router, call after call, as the object of Megatron's `router_replay`."""

    chosen: list[torch.Tensor] = field(default_factory=list)
    """Experts of each call of the first pass, (tokens, topk)."""
    calls: int | None = None
    """Number of calls so far in this pass. None: the first pass, in which the router chooses."""
    tokens: int = 0
    """Tokens of the last pass."""
    rerouted: int = 0
    """Tokens of the last pass for which its scores would choose other experts."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: _TopkFunction,
        **_named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of the experts that the first pass chose, and the experts.

        Megatron calls it instead of choosing the experts itself. The arguments are Megatron's.
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
    """The experts that the routers choose in the first pass. Later passes follow them.

    Nearly equal scores have another order in another precision, and an expert then multiplies other
    tokens. With equal routes the results of every GEMM are of the same tokens. Megatron calls the
    object at a router's `router_replay` for the experts of each call
    (transformer/moe/moe_utils.py, topk_routing_with_score_function).
    """

    def __init__(self) -> None:
        self._replays: dict[tuple[int, str], _RouterReplay] = {}
        """Layer and name of a router -> its choices."""

    @contextmanager
    def follow(self, model: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Let the routers of a model choose or follow the experts in a ``with`` block of one pass.

        In the first pass the routers choose. In later passes they follow.
        """
        is_first = not self._replays
        patches: list[Patch] = []
        for module, label in name_modules_by_layer(model).items():
            if isinstance(module, TopKRouter):
                replay = self._replays.setdefault(label, _RouterReplay())
                replay.tokens = 0
                replay.rerouted = 0
                replay.calls = 0
                if is_first:
                    replay.calls = None
                patches.append((module, "router_replay", replay))
        with apply_patches(patches):
            yield

    @property
    def rerouted_share(self) -> float | None:
        """Share of the last pass's tokens whose scores would choose other experts.

        It is None for a model without routers.
        """
        tokens = sum(replay.tokens for replay in self._replays.values())
        rerouted = sum(replay.rerouted for replay in self._replays.values())
        if not tokens:
            return None
        return rerouted / tokens
