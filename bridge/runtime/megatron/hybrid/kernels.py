"""Compiled packages that layers of Megatron call, and torch code that takes their places where they are missing.

`stand_ins` is a part of a run on a CPU: for its length the layers find the torch code under the names of the package.
Nothing of it exists outside of a run. With CUDA, Megatron's own error names the package that is missing.
"""

import importlib
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from bridge.runtime.megatron.hybrid.state_space import GatedRMSNorm, chunk_scan, convolved_scan
from bridge.runtime.megatron.replacement import replaced


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return x divided by the length of its last axis, in the dtype of x, as `l2norm` of fla does."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def delta_rule(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what `chunk_gated_delta_rule` of fla does, by Megatron's own form in torch for its deterministic mode."""
    layer = importlib.import_module("megatron.core.ssm.gated_delta_net")
    result: tuple[torch.Tensor, torch.Tensor | None] = layer.torch_chunk_gated_delta_rule(
        *args, **kwargs
    )
    return result


def causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return each channel of x (B, L, D) convolved with its past, in the dtype of x, as `causal_conv1d` of fla does.

    `weight` (D, W) has the taps, the last of which is for the token itself. The activation is silu or none. The second
    result is the state for inference, which training does not ask for.
    """
    past = torch.nn.functional.pad(x.float().transpose(1, 2), (weight.shape[1] - 1, 0))
    wide_bias = None if bias is None else bias.float()
    y = torch.nn.functional.conv1d(
        past, weight.float()[:, None], wide_bias, groups=weight.shape[0]
    ).transpose(1, 2)
    activated = torch.nn.functional.silu(y) if activation in ("silu", "swish") else y
    return activated.to(x.dtype), None


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


class ShardedGatedNorm(GatedRMSNorm):
    """The gated norm of a Mamba mixer: its channels are split over the tensor-parallel ranks."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """Return the weight as a part of the whole, for a checkpoint."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StandIn:
    """Torch code for one package."""

    package: str
    layer: str
    """Module or package of Megatron that calls it."""
    values: Mapping[str, Any]
    """Name there -> the value without the package."""


STAND_INS = (
    StandIn(
        package="mamba_ssm",
        layer="megatron.core.ssm.mamba_mixer",
        values={
            "HAVE_MAMBA_SSM": True,
            "RMSNormGated": GatedRMSNorm,
            "ExtendedRMSNorm": ShardedGatedNorm,
            "mamba_chunk_scan_combined": chunk_scan,
            "mamba_split_conv1d_scan_combined": convolved_scan,
        },
    ),
    StandIn(
        package="fla",
        layer="megatron.core.ssm.gated_delta_net",
        values={
            "HAVE_FLA": True,
            "l2norm": l2norm,
            "chunk_gated_delta_rule": delta_rule,
            "causal_conv1d": causal_convolution,
        },
    ),
    StandIn(
        package="fast_hadamard_transform",
        layer="megatron.core.transformer.experimental_attention_variant.dsa",
        values={"hadamard_transform": hadamard_transform},
    ),
)
SPECS = "megatron.core.models.mamba.mamba_layer_specs"
"""Megatron's spec of a hybrid's layers, which imports the mixer."""
_OF_TRITON = ("megatron.core.ssm.mamba_mixer", SPECS)
"""Modules that cannot be imported without Triton. megatron-core 0.19 has no part that can."""
_TENSOR_OPS = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"
_UNCALLED = ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge")
"""Functions of that module, which the mixer calls in inference alone."""
_put_away: dict[str, types.ModuleType] = {}
"""The modules that need Triton, outside of a run."""


@contextmanager
def stand_ins() -> Iterator[None]:
    """Put the torch code into Megatron's layers for a ``with`` block, for the packages that are not installed."""
    with ExitStack() as stack:
        stack.enter_context(_without_triton())
        for one in STAND_INS:
            if find_spec(one.package) is None:
                layers = _modules_of(one.layer)
                stack.enter_context(
                    replaced(
                        (layer, name, value)
                        for layer in layers
                        for name, value in one.values.items()
                    )
                )
        yield


def _modules_of(layer: str) -> list[types.ModuleType]:
    """Return the module of a layer, and those inside of it where it is a package; empty where a release has none."""
    if find_spec(layer) is None:
        return []
    importlib.import_module(layer)
    return [module for name, module in sys.modules.items() if f"{name}.".startswith(f"{layer}.")]


@contextmanager
def _without_triton() -> Iterator[None]:
    """Let the modules that need Triton be imported without it for a ``with`` block, after which they are gone again."""
    if find_spec("triton") is not None or _OF_TRITON[0] in sys.modules:
        yield
        return
    if not _put_away:
        stub = sys.modules[_TENSOR_OPS] = types.ModuleType(_TENSOR_OPS)
        stub.__dict__.update(dict.fromkeys(_UNCALLED))
        try:
            _put_away.update({name: importlib.import_module(name) for name in _OF_TRITON})
        finally:
            del sys.modules[_TENSOR_OPS]
    for name, module in _put_away.items():
        sys.modules[name] = module
        setattr(*_place_of(name), module)
    try:
        yield
    finally:
        for name in _put_away:
            del sys.modules[name]
            delattr(*_place_of(name))


def _place_of(name: str) -> tuple[types.ModuleType, str]:
    """Return the package of a module, and its name there."""
    package, _, child = name.rpartition(".")
    return sys.modules[package], child
