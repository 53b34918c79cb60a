"""`find_first_not_finite`: the layer, module and GEMM of the first non-finite gradient.

A skipped step leaves its gradients in their buffers. They are examined only after such a step, so
that a step without a fault costs nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bridge.runtime.megatron.model.gpt import unwrap_model
from bridge.runtime.megatron.process.agreement import compute_on_all_ranks
from bridge.runtime.megatron.record.telemetry import name_modules_by_layer

CHECKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class _Gradient:
    """The gradient of a parameter. Gradients are ordered as the forward pass reads parameters."""

    part: int
    """0 for embeddings, 1 for layers, 2 for all other modules."""
    layer: int
    order: tuple[int, bool, int]
    """Position of its part of the layer, whether it is the projection of the attention, position of
    the module. The projection runs last in the attention, and Megatron constructs it first.
    """
    name: str
    is_matrix: bool
    is_finite: bool


@torch.no_grad()
def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether no tensor of a 16-bit or 32-bit dtype has NaN or Inf.

    The smallest and the largest value of a tensor show both NaN and Inf. The maximum norm would
    show them too, but torch computes it on a CPU without vector instructions.
    """
    edges: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.dtype in CHECKED_DTYPES and tensor.numel():
            smallest, largest = tensor.aminmax()
            edges += [smallest.float(), largest.float()]
    return not edges or bool(torch.stack(edges).isfinite().all())


def find_first_not_finite(model: list[Any]) -> str | None:
    """Return a clause about the first NaN or Inf of a backward pass, on any rank.

    The result is None without NaN and Inf.

    This is a collective call. After a backward pass only the gradients of weights are kept. If
    gradients of several modules are not finite, the fault came through the dgrad of the module that
    ran before the first of them. A single gradient that is not finite is a fault of the module's
    wgrad.

    Args:
        model: Chunks of this rank.
    """
    gradients: list[_Gradient] = []
    for rank_gradients in compute_on_all_ranks(lambda: list(_list_gradients(model))):
        gradients.extend(rank_gradients)
    gradients.sort(reverse=True)  # in the order of the backward pass
    finite_before: list[_Gradient] = []
    not_finite: list[str] = []
    for gradient in gradients:
        if gradient.is_finite and not not_finite:
            finite_before.append(gradient)
        if not gradient.is_finite and gradient.name not in not_finite:
            not_finite.append(gradient.name)
    if not not_finite:
        return None
    first = not_finite[0]
    if len(not_finite) == 1:
        return f"in the wgrad of {first} alone"
    source = "after the loss"
    for gradient in finite_before:
        if gradient.is_matrix and gradient.name != first:
            source = f"after the dgrad of {gradient.name}"
    others = len(not_finite) - 1
    return (
        f"{source}, first in the wgrad of {first}, then in those of {others} modules further back"
    )


def _get_model_part(layer: int, path: str) -> int:
    """Return the field `part` of a gradient."""
    if layer:
        return 1
    if "embedding" in path:
        return 0
    return 2


def _list_gradients(model: list[Any]) -> Iterator[_Gradient]:
    """Yield the gradients of this rank's parameters."""
    for chunk in model:
        layers = name_modules_by_layer([chunk])
        begins: dict[tuple[int, str], int] = {}
        for index, (path, module) in enumerate(unwrap_model(chunk).named_modules()):
            layer, name = layers.get(module, (0, path))
            full_name = name
            if layer:
                full_name = f"layer {layer}, {name}"
            begin = begins.setdefault((layer, name.partition(".")[0]), index)
            for parameter in module.parameters(recurse=False):
                gradient = getattr(parameter, "main_grad", parameter.grad)
                if gradient is not None:
                    yield _Gradient(
                        part=_get_model_part(layer, path),
                        layer=layer,
                        order=(begin, name.endswith("linear_proj"), index),
                        name=full_name,
                        is_matrix=parameter.ndim > 1,
                        is_finite=are_finite([gradient]),
                    )
