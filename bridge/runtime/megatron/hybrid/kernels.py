"""Torch code that replaces compiled packages which layers of Megatron call.

In a run on a CPU `use_torch_fallbacks` puts the torch code into the layers, under the names of the
package. Outside of a run the layers are as Megatron has them. A run with CUDA gets no torch code:
Megatron's error names the missing package.
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

from bridge.runtime.megatron.hybrid.state_space import GatedRMSNorm, convolve_and_scan, scan_chunks
from bridge.runtime.megatron.patching import apply_patches


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return x divided by the length of its last axis, in x's dtype, as `l2norm` of fla does."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def apply_delta_rule(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the result of fla's `chunk_gated_delta_rule`, by Megatron's torch code for it.

    Megatron has the torch code for its deterministic mode.
    """
    layer = importlib.import_module("megatron.core.ssm.gated_delta_net")
    result: tuple[torch.Tensor, torch.Tensor | None] = layer.torch_chunk_gated_delta_rule(
        *args, **kwargs
    )
    return result


def apply_causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return each channel convolved with its past, as fla's `causal_conv1d` does, and None.

    Args:
        x: (B, L, D).
        weight: (D, W) taps; the last tap is for the token itself.
        bias: (D). None: no bias.
        activation: silu or swish. None: no activation.

    Returns:
        (B, L, D) in the dtype of x. The second result is the state for inference, which training
        does not need.
    """
    past = torch.nn.functional.pad(x.float().transpose(1, 2), (weight.shape[1] - 1, 0))
    if bias is not None:
        bias = bias.float()
    convolved = torch.nn.functional.conv1d(
        past, weight.float()[:, None], bias, groups=weight.shape[0]
    )
    y = convolved.transpose(1, 2)
    if activation in ("silu", "swish"):
        y = torch.nn.functional.silu(y)
    return y.to(x.dtype), None


def hadamard_transform(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return scale * (Sylvester's matrix) x along the last axis, in the dtype of x.

    It computes the same as the package fast_hadamard_transform. An axis whose length is not a power
    of two is padded with zeros, and the results beyond its length are dropped.
    """
    width = x.shape[-1]
    padded_width = 1 << (width - 1).bit_length()
    y = torch.nn.functional.pad(x.float(), (0, padded_width - width))
    distance = 1
    while distance < padded_width:
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
class TorchFallback:
    """Torch code in place of a package."""

    package: str
    layer: str
    """Module or package of Megatron that calls the package."""
    values: Mapping[str, Any]
    """Name in the layer's module -> its value in a run without the package."""


TORCH_FALLBACKS = (
    TorchFallback(
        package="mamba_ssm",
        layer="megatron.core.ssm.mamba_mixer",
        values={
            "HAVE_MAMBA_SSM": True,
            "RMSNormGated": GatedRMSNorm,
            "ExtendedRMSNorm": ShardedGatedNorm,
            "mamba_chunk_scan_combined": scan_chunks,
            "mamba_split_conv1d_scan_combined": convolve_and_scan,
        },
    ),
    TorchFallback(
        package="fla",
        layer="megatron.core.ssm.gated_delta_net",
        values={
            "HAVE_FLA": True,
            "l2norm": l2norm,
            "chunk_gated_delta_rule": apply_delta_rule,
            "causal_conv1d": apply_causal_conv1d,
        },
    ),
    TorchFallback(
        package="fast_hadamard_transform",
        layer="megatron.core.transformer.experimental_attention_variant.dsa",
        values={"hadamard_transform": hadamard_transform},
    ),
)
MAMBA_SPECS_MODULE = "megatron.core.models.mamba.mamba_layer_specs"
"""Megatron's spec of a hybrid's layers, which imports the mixer."""
_MIXER_MODULE = "megatron.core.ssm.mamba_mixer"
_TRITON_DEPENDENTS = (_MIXER_MODULE, MAMBA_SPECS_MODULE)
"""Modules that cannot be imported without Triton, in megatron-core 0.19 not even in part."""
_TENSOR_OPS_MODULE = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"
_TENSOR_OPS_NAMES = ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge")
"""Functions of that module, which the mixer calls only in inference."""
_triton_modules: dict[str, types.ModuleType] = {}
"""Name -> module that needs Triton, kept for the next run."""


@contextmanager
def use_torch_fallbacks() -> Iterator[None]:
    """Put torch code into Megatron's layers for missing packages, in a ``with`` block."""
    with ExitStack() as stack:
        stack.enter_context(_import_without_triton())
        for fallback in TORCH_FALLBACKS:
            if find_spec(fallback.package) is not None:
                continue
            patches = []
            for module in _import_layer_modules(fallback.layer):
                for name, value in fallback.values.items():
                    patches.append((module, name, value))
            stack.enter_context(apply_patches(patches))
        yield


def _import_layer_modules(layer: str) -> list[types.ModuleType]:
    """Return the imported module of a layer, or the modules of a package.

    The result is empty if the layer does not exist.
    """
    if find_spec(layer) is None:
        return []
    importlib.import_module(layer)
    return [module for name, module in sys.modules.items() if f"{name}.".startswith(f"{layer}.")]


@contextmanager
def _import_without_triton() -> Iterator[None]:
    """Import the modules that need Triton without it, for a ``with`` block.

    After the block they are not in `sys.modules`: other code must not find them there.
    """
    if find_spec("triton") is not None or _MIXER_MODULE in sys.modules:
        yield
        return
    if not _triton_modules:
        stub = types.ModuleType(_TENSOR_OPS_MODULE)
        stub.__dict__.update(dict.fromkeys(_TENSOR_OPS_NAMES))
        sys.modules[_TENSOR_OPS_MODULE] = stub
        try:
            modules = {name: importlib.import_module(name) for name in _TRITON_DEPENDENTS}
            _triton_modules.update(modules)
        finally:
            del sys.modules[_TENSOR_OPS_MODULE]
    for name, module in _triton_modules.items():
        sys.modules[name] = module
        setattr(*_split_module_name(name), module)
    try:
        yield
    finally:
        for name in _triton_modules:
            del sys.modules[name]
            delattr(*_split_module_name(name))


def _split_module_name(name: str) -> tuple[types.ModuleType, str]:
    """Return the package of a module, and its name there."""
    package, _, child = name.rpartition(".")
    return sys.modules[package], child
