"""The first gradient of a backward pass that is not finite: its layer, module and GEMM.

A skipped step leaves its gradients where they are, so that a step without a fault costs nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bridge.runtime.megatron.agreement import from_all_ranks
from bridge.runtime.megatron.gpt import unwrapped
from bridge.runtime.megatron.record.telemetry import global_layer_names

WIDE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class _Gradient:
    """The gradient of one parameter; gradients are ordered as the forward pass reads the parameters."""

    part: int
    """0: embeddings, 1: layers, 2: the rest."""
    layer: int
    order: tuple[int, bool, int]
    """Position of its part of the layer, whether it is the projection of the attention, position of the module."""
    name: str
    is_matrix: bool
    is_finite: bool


@torch.no_grad()
def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether no tensor of a 16-bit or 32-bit dtype holds NaN or Inf; smallest and largest value keep either.

    The norm of the largest magnitude would say the same; torch computes it on a CPU without vector instructions.
    """
    looked_at = [tensor for tensor in tensors if tensor.dtype in WIDE and tensor.numel()]
    edges = [edge.float() for tensor in looked_at for edge in tensor.aminmax()]
    return not edges or bool(torch.stack(edges).isfinite().all())


def first_not_finite(model: list[Any]) -> str | None:
    """Return where a backward pass first has NaN or Inf, on any rank, as a clause; a collective call.

    The other results of a layer's backward pass are not kept. Where the gradients further back are not finite either,
    the fault came through the dgrad of the layer in front; a single one is a fault of its own GEMM.
    """
    parts = from_all_ranks(lambda: list(_gradients(model)))
    everywhere = sorted((one for part in parts for one in part), reverse=True)
    wrong = [index for index, one in enumerate(everywhere) if not one.is_finite]
    if not wrong:
        return None
    first = everywhere[wrong[0]].name
    names = list(dict.fromkeys(everywhere[index].name for index in wrong))
    if len(names) == 1:
        return f"in the wgrad of {first} alone"
    ahead = [one.name for one in everywhere[: wrong[0]] if one.is_matrix and one.name != first]
    source = f"after the dgrad of {ahead[-1]}" if ahead else "after the loss"
    return f"{source}, first in the wgrad of {first}, then in those of {len(names) - 1} modules further back"


def _part(layer: int, path: str) -> int:
    if layer:
        return 1
    return 0 if "embedding" in path else 2


def _gradients(model: list[Any]) -> Iterator[_Gradient]:
    for chunk in model:
        layers = global_layer_names([chunk])
        begins: dict[tuple[int, str], int] = {}
        for index, (path, module) in enumerate(unwrapped(chunk).named_modules()):
            layer, name = layers.get(module, (0, path))
            begin = begins.setdefault((layer, name.partition(".")[0]), index)
            for parameter in module.parameters(recurse=False):
                gradient = getattr(parameter, "main_grad", parameter.grad)
                if gradient is not None:
                    yield _Gradient(
                        part=_part(layer, path),
                        layer=layer,
                        order=(begin, name.endswith("linear_proj"), index),
                        name=f"layer {layer}, {name}" if layer else name,
                        is_matrix=parameter.ndim > 1,
                        is_finite=are_finite([gradient]),
                    )
