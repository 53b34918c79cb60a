"""The experts that routers choose, taken from one pass of a model into another.

    routes = Routes()
    with routes.taken(model):
        ...  # one forward and backward pass, which chooses
    with routes.taken(other_model):
        ...  # the same batch, to the same experts
    routes.rerouted  # the part of its tokens that the other model would have sent elsewhere

Two precisions give nearly equal scores other orders, and an expert then multiplies other tokens. With the routes of one
pass in the other the results of every GEMM are of the same tokens. Megatron asks the object at a router's
`router_replay` for the experts of each call (transformer/moe/moe_utils.py, topk_routing_with_score_function).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from bridge.megatron.record.telemetry import global_layer_names
from bridge.megatron.replacement import replaced

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
        self, scores: torch.Tensor, topk: int, groups: int | None, group_topk: int | None, choose: _Choose
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of the chosen experts, and their numbers."""
        values, own = choose(scores, topk, num_groups=groups, group_topk=group_topk)
        if self.taken is None:
            self.chosen.append(own)
            return values, own
        experts = self.chosen[self.taken]
        self.taken += 1
        self.tokens += len(own)
        self.rerouted += int((own.sort().values != experts.sort().values).any(-1).sum())
        return scores.gather(1, experts), experts


class Routes:
    """The routes of a model's routers: the first pass chooses them, and each later one takes them."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, str], _Route] = {}

    @contextmanager
    def taken(self, model: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Let the routers of a model choose, or take what was chosen, for a ``with`` block around one pass."""
        is_first = not self._of
        changes: list[tuple[Any, str, Any]] = []
        for module, where in global_layer_names(model).items():
            if isinstance(module, TopKRouter):
                route = self._of.setdefault(where, _Route())
                route.taken, route.tokens, route.rerouted = None if is_first else 0, 0, 0
                changes.append((module, "router_replay", route))
        with replaced(changes):
            yield

    @property
    def rerouted(self) -> float | None:
        """Part of the last pass's tokens for which its own scores name other experts; None without routers."""
        tokens = sum(route.tokens for route in self._of.values())
        return sum(route.rerouted for route in self._of.values()) / tokens if tokens else None
