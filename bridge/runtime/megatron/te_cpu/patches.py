"""Callables of torch, Transformer Engine and Megatron that are replaced so that they run on a CPU, one row each.

They are in place from `install` to the end of the process; Transformer Engine cannot be taken out of one again. Two of
Transformer Engine's questions ("is there CUDA?", "is this tensor on it?") are answered with yes only while the callable
that asks runs: answered for good, they would lead torch and Megatron to CUDA too.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import torch

from bridge.runtime.megatron.replacement import (
    Rows,
    always,
    on_cpu,
    replaced,
    rng_state,
    set_rng_state,
)
from bridge.runtime.megatron.te_cpu.storage import dequantize


class _Event:
    """An event on a device that does things in order anyway."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.record = self.wait = self.synchronize = lambda *_: None
        self.query = lambda: True


_DONE = SimpleNamespace(wait=lambda: None)
"""The handle of collectives that have ended."""


_WITH_CUDA = replaced([(torch.cuda, "is_available", lambda: True)])
"""Decorator: there is CUDA for the length of each call."""
_ON_CUDA = replaced([(torch.Tensor, "is_cuda", property(lambda _self: True))])
"""Decorator: every tensor is on it."""


def _of_current(name: str) -> Callable[[Any], Any]:
    """The method of the quantizer of current scaling, whose tensors are those of delayed scaling too."""
    path = f"transformer_engine.pytorch.tensor.float8_tensor.Float8CurrentScalingQuantizer.{name}"
    return lambda _original: resolve_name(path)


def _dequantized(_original: Any) -> Any:
    """The forward pass of a dequantisation, without the way over CUDA."""
    return staticmethod(lambda *args: dequantize(*args[1:3]))


def patches(capability: tuple[int, int]) -> Rows:
    """Return every replacement, in order; patches.yaml says who needs each, and the failure without."""
    properties = SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        multi_processor_count=132,
        name="CPU",
        total_memory=80 << 30,
    )
    is_supported = capability >= (9, 0)
    supported = (
        is_supported,
        "" if is_supported else "FP8 block scaling needs compute capability 9.0",
    )
    te = "transformer_engine.pytorch"
    delayed = f"{te}.tensor.float8_tensor.Float8Quantizer"
    return {
        "torch.cuda.get_device_capability": always(capability),
        "torch.cuda.get_device_properties": always(properties),
        "torch.cuda.Event": lambda _original: _Event,
        "torch.cuda.is_current_stream_capturing": always(False),
        "torch.cuda.is_bf16_supported": always(True),
        "torch.Tensor.record_stream": always(None),
        "torch.Tensor.to": on_cpu,
        "torch.load": on_cpu,
        "torch.distributed._coalescing_manager": always(nullcontext(_DONE)),
        f"{te}.quantization.check_fp8_block_scaling_support": always(supported),
        f"{te}.distributed._get_cuda_rng_state": rng_state,
        f"{te}.distributed._set_cuda_rng_state": set_rng_state,
        **{
            f"{delayed}.{name}": _of_current(name)
            for name in ("inner_tensor_specs", "storage_metadata")
        },
        f"{te}.tensor.storage.mxfp8_tensor_storage._FromMXFP8Func.forward": _dequantized,
        f"{te}.tensor.storage.nvfp4_tensor_storage._FromNVFP4Func.forward": _dequantized,
        f"{te}.module.base.TransformerEngineBaseModule.__init__": _WITH_CUDA,
        f"{te}.module.base.TransformerEngineBaseModule.prepare_forward": _ON_CUDA,
        f"{te}.attention.DotProductAttention.forward": _ON_CUDA,
    }


def save_without_state() -> None:
    """Let grouped experts that have no extra state be saved, as megatron-core 0.19 does.

    Earlier ones split the state by expert without looking (extensions/transformer_engine.py:1705).
    """
    from megatron.core.extensions.transformer_engine import (
        TEGroupedLinear,
    )  # imported by `install`, with its patches

    split = TEGroupedLinear._split_extra_state  # noqa: SLF001 the one that Megatron calls

    def split_if_any(self: Any, state: Any, *others: Any, **named: Any) -> Any:
        return split(self, state, *others, **named) if state.numel() else [state] * self.num_gemms

    TEGroupedLinear._split_extra_state = split_if_any  # noqa: SLF001
