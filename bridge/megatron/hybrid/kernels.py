"""Compiled packages that layers of Megatron import, and torch code that takes their places where they are missing.

`import_layers` imports those layers. A module that is not installed is in place while they are imported and gone
afterwards, so that no other code takes it for the package.
"""

import importlib
import sys
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import torch

from bridge.megatron.hybrid.state_space import GatedRMSNorm, chunk_scan, convolved_scan

LAYERS = (
    "megatron.core.ssm.mamba_mixer",
    "megatron.core.ssm.gated_delta_net",
    "megatron.core.transformer.experimental_attention_variant.dsa",
)
"""Modules of Megatron that import one of the packages."""
_TENSOR_OPS = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return x divided by the length of its last axis, in the dtype of x, as `l2norm` of fla does."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def delta_rule(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what `chunk_gated_delta_rule` of fla does, by Megatron's own form in torch for its deterministic mode."""
    layer = importlib.import_module("megatron.core.ssm.gated_delta_net")
    result: tuple[torch.Tensor, torch.Tensor | None] = layer.torch_chunk_gated_delta_rule(*args, **kwargs)
    return result


def hadamard_transform(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return the last axis times Sylvester's matrix and a factor, in the dtype of x, as fast_hadamard_transform does.

    An axis that is no power of two is padded with zeros, and the results beyond it are dropped.
    """
    width, distance = x.shape[-1], 1
    y = torch.nn.functional.pad(x.float(), (0, (1 << (width - 1).bit_length()) - width))
    while distance < y.shape[-1]:
        first, second = torch.unflatten(y, -1, (-1, 2, distance)).unbind(-2)
        y = torch.stack((first + second, first - second), -2).flatten(-3)
        distance *= 2
    return (y[..., :width] * scale).to(x.dtype)


KERNELS: Mapping[str, tuple[str, Mapping[str, Callable[..., Any] | None]]] = {
    "mamba_ssm.ops.triton.layernorm_gated": ("mamba_ssm", {"RMSNorm": GatedRMSNorm}),
    "mamba_ssm.ops.triton.ssd_combined": (
        "mamba_ssm",
        {"mamba_chunk_scan_combined": chunk_scan, "mamba_split_conv1d_scan_combined": convolved_scan},
    ),
    "fla.modules.l2norm": ("fla", {"l2norm": l2norm}),
    "fla.ops.gated_delta_rule": ("fla", {"chunk_gated_delta_rule": delta_rule}),
    "fast_hadamard_transform": ("fast_hadamard_transform", {"hadamard_transform": hadamard_transform}),
    _TENSOR_OPS: ("triton", dict.fromkeys(("tensor_get_slice_after", "tensor_masked_update", "tensor_merge"))),
}
"""Module -> the package without which it cannot be imported, and its names; None: only inference calls it."""


def _imported(layer: str) -> types.ModuleType:
    """Import a module, again where another program imported it without the packages: its functions see the new ones."""
    before = sys.modules.get(layer)
    return importlib.import_module(layer) if before is None else importlib.reload(before)


def import_layers() -> None:
    """Import the layers of this Megatron Core that need the packages."""
    missing = {name for name, (package, _) in KERNELS.items() if find_spec(package) is None} - sys.modules.keys()
    for name in missing:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(KERNELS[name][1])
    try:
        for layer in LAYERS:
            with suppress(ModuleNotFoundError):  # a release that has no such layer
                _imported(layer)
    finally:
        for name in missing:
            del sys.modules[name]
