"""Callables of torch, Transformer Engine and Megatron that are replaced to run on a CPU, a row each.

The replacements stay from `install` to the end of the process, since Transformer Engine cannot be
removed from a process. `torch.cuda.is_available` and `Tensor.is_cuda` are True only while certain
callables of Transformer Engine run: everywhere else torch and Megatron would take them for a GPU.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import torch

from bridge.runtime.megatron.patching import (
    PatchTable,
    apply_patches,
    redirect_to_cpu,
    replace_by_constant,
    replace_rng_getter,
    replace_rng_setter,
)
from bridge.runtime.megatron.te_cpu.storage import dequantize


class _FinishedEvent:
    """An event of a device that executes everything in order."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.record = self.wait = self.synchronize = lambda *_: None
        self.query = lambda: True


_FINISHED_WORK = SimpleNamespace(wait=lambda: None)
"""The handle of collectives that have ended."""


_CUDA_IS_AVAILABLE = apply_patches([(torch.cuda, "is_available", lambda: True)])
"""Decorator: CUDA is available for the length of each call."""
_TENSORS_ARE_CUDA = apply_patches([(torch.Tensor, "is_cuda", property(lambda _self: True))])
"""Decorator: every tensor is on CUDA for the length of each call."""


def _use_current_scaling_method(name: str) -> Callable[[Any], Any]:
    """Return the replacement by a method of the quantizer of current scaling.

    Delayed scaling has tensors of the same class.
    """
    path = f"transformer_engine.pytorch.tensor.float8_tensor.Float8CurrentScalingQuantizer.{name}"
    return lambda _original: resolve_name(path)


def _replace_dequantize_forward(_original: Any) -> Any:
    """Return the forward pass of a dequantisation that does not move the tensor to CUDA."""
    return staticmethod(lambda *args: dequantize(*args[1:3]))


def build_patch_table(capability: tuple[int, int]) -> PatchTable:
    """Return every replacement, in order.

    The file patches.yaml has the caller that needs each, and the failure without it.
    """
    properties = SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        multi_processor_count=132,
        name="CPU",
        total_memory=80 << 30,
    )
    supported = (True, "")
    if capability < (9, 0):
        supported = (False, "FP8 block scaling needs compute capability 9.0")
    te = "transformer_engine.pytorch"
    delayed = f"{te}.tensor.float8_tensor.Float8Quantizer"
    return {
        "torch.cuda.get_device_capability": replace_by_constant(capability),
        "torch.cuda.get_device_properties": replace_by_constant(properties),
        "torch.cuda.Event": lambda _original: _FinishedEvent,
        "torch.cuda.is_current_stream_capturing": replace_by_constant(False),
        "torch.cuda.is_bf16_supported": replace_by_constant(True),
        "torch.Tensor.record_stream": replace_by_constant(None),
        "torch.Tensor.to": redirect_to_cpu,
        "torch.load": redirect_to_cpu,
        "torch.distributed._coalescing_manager": replace_by_constant(nullcontext(_FINISHED_WORK)),
        f"{te}.quantization.check_fp8_block_scaling_support": replace_by_constant(supported),
        f"{te}.distributed._get_cuda_rng_state": replace_rng_getter,
        f"{te}.distributed._set_cuda_rng_state": replace_rng_setter,
        f"{delayed}.inner_tensor_specs": _use_current_scaling_method("inner_tensor_specs"),
        f"{delayed}.storage_metadata": _use_current_scaling_method("storage_metadata"),
        f"{te}.tensor.storage.mxfp8_tensor_storage._FromMXFP8Func.forward": _replace_dequantize_forward,
        f"{te}.tensor.storage.nvfp4_tensor_storage._FromNVFP4Func.forward": _replace_dequantize_forward,
        f"{te}.module.base.TransformerEngineBaseModule.__init__": _CUDA_IS_AVAILABLE,
        f"{te}.module.base.TransformerEngineBaseModule.prepare_forward": _TENSORS_ARE_CUDA,
        f"{te}.attention.DotProductAttention.forward": _TENSORS_ARE_CUDA,
    }


def patch_empty_extra_state() -> None:
    """Save grouped experts that have no extra state, as megatron-core 0.19 does.

    Earlier releases split an empty state by expert, which fails
    (extensions/transformer_engine.py:1705).
    """
    # imported by `install`, with its patches
    from megatron.core.extensions.transformer_engine import TEGroupedLinear

    split = TEGroupedLinear._split_extra_state  # noqa: SLF001 a private method that Megatron calls

    def split_if_any(self: Any, state: Any, *others: Any, **named: Any) -> Any:
        if state.numel():
            return split(self, state, *others, **named)
        return [state] * self.num_gemms

    TEGroupedLinear._split_extra_state = split_if_any  # noqa: SLF001
