"""Callables of torch, Transformer Engine and Megatron that are replaced so that they run on a CPU, one row each.

They are in place from `install` to the end of the process; Transformer Engine cannot be taken out of one again. Two of
Transformer Engine's questions ("is there CUDA?", "is this tensor on it?") are answered with yes only while the callable
that asks runs: answered for good, they would lead torch and Megatron to CUDA too.
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml

from bridge.megatron.te_cpu.find import VERSIONS
from bridge.megatron.te_cpu.storage import dequantize


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """One callable and its replacement."""

    row: str
    """Its key in patches.yaml."""
    module: str
    """The module that holds it."""
    path: str
    """Attributes from the module to the callable."""
    replace: Callable[[Any], Any]
    """Original -> replacement."""
    needed_by: str
    without: str
    releases: tuple[str, ...] = VERSIONS
    """Releases of Transformer Engine that need it."""

    def apply(self) -> None:
        """Replace the callable for good."""
        owner: Any = importlib.import_module(self.module)
        *parents, name = self.path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, self.replace(getattr(owner, name)))


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _always(value: Any) -> Callable[[Any], Callable[..., Any]]:
    return lambda _original: lambda *_args, **_kwargs: value


def _moved_to_cpu(to: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`Tensor.to` for which "cuda" means the CPU."""

    @functools.wraps(to)
    def moved(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        return to(self, *("cpu" if _is_cuda(argument) else argument for argument in args), **kwargs)

    return moved


def _loaded_on_cpu(load: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.load` for which map_location="cuda" means the CPU."""

    @functools.wraps(load)
    def loaded(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("map_location")):
            kwargs["map_location"] = "cpu"
        return load(*args, **kwargs)

    return loaded


class _Event:
    """An event on a device that does things in order anyway."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def record(self, *_args: Any) -> None:
        """Nothing to record."""

    def wait(self, *_args: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Return that all is done."""
        return True


class _Done:
    """The handle of collectives that have ended."""

    def wait(self) -> None:
        """Nothing to wait for."""


@contextmanager
def _nothing(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


@contextmanager
def _one_by_one(*_args: Any, **_kwargs: Any) -> Iterator[_Done]:
    yield _Done()


def _while_it_runs(owner: Any, name: str, answer: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a wrapper that sets an attribute of torch for the length of each call."""

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            is_own, before = name in vars(owner), vars(owner).get(name)
            setattr(owner, name, answer)
            try:
                return original(*args, **kwargs)
            finally:
                if is_own:
                    setattr(owner, name, before)
                else:
                    delattr(owner, name)

        return call

    return wrapped


def _entered_on_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Answer for the length of a call, or while a context manager is entered: Transformer Engine 2.9 has one."""
    if not hasattr(original, "__wrapped__"):
        return _ON_CUDA(original)

    @contextmanager
    def entered(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with ExitStack() as stack:
            yield _ON_CUDA(stack.enter_context)(original(*args, **kwargs))

    return entered


_WITH_CUDA = _while_it_runs(torch.cuda, "is_available", lambda: True)
_ON_CUDA = _while_it_runs(torch.Tensor, "is_cuda", property(lambda _self: True))


def _dequantized(_original: Any) -> Any:
    """The forward pass of a dequantisation, without the way over CUDA."""

    def forward(_ctx: Any, tensor: Any, dtype: torch.dtype) -> torch.Tensor:
        return dequantize(tensor, dtype)

    return staticmethod(forward)


def patches(capability: tuple[int, int], release: str) -> tuple[Patch, ...]:
    """Return every replacement, in order; patches.yaml says who needs each, and the failure without."""
    properties = SimpleNamespace(
        major=capability[0], minor=capability[1], multi_processor_count=132, name="CPU", total_memory=80 << 30
    )
    is_supported = capability >= (9, 0)
    supported = (is_supported, "" if is_supported else "FP8 block scaling needs compute capability 9.0")
    te = "transformer_engine.pytorch"
    rows: list[tuple[str, str, str, Callable[[Any], Any]]] = [
        ("torch.cuda.get_device_capability", "torch.cuda", "get_device_capability", _always(capability)),
        ("torch.cuda.get_device_properties", "torch.cuda", "get_device_properties", _always(properties)),
        ("torch.cuda.Event", "torch.cuda", "Event", lambda _original: _Event),
        ("torch.cuda.device", "torch.cuda", "device", lambda _original: _nothing),
        ("torch.cuda.nvtx.range", "torch.cuda.nvtx", "range", lambda _original: _nothing),
        ("torch.cuda.is_current_stream_capturing", "torch.cuda", "is_current_stream_capturing", _always(False)),
        ("torch.cuda.is_bf16_supported", "torch.cuda", "is_bf16_supported", _always(True)),
        ("torch.Tensor.record_stream", "torch", "Tensor.record_stream", _always(None)),
        ("torch.Tensor.to", "torch", "Tensor.to", _moved_to_cpu),
        ("torch.load", "torch", "load", _loaded_on_cpu),
        ("torch.distributed._coalescing_manager", "torch.distributed", "_coalescing_manager", lambda _o: _one_by_one),
        (
            "quantization.check_fp8_block_scaling_support",
            f"{te}.quantization",
            "check_fp8_block_scaling_support",
            _always(supported),
        ),
        (
            "distributed._get_cuda_rng_state",
            f"{te}.distributed",
            "_get_cuda_rng_state",
            lambda _original: lambda *_args, **_kwargs: torch.get_rng_state(),
        ),
        (
            "distributed._set_cuda_rng_state",
            f"{te}.distributed",
            "_set_cuda_rng_state",
            lambda _original: lambda state, *_args, **_kwargs: torch.set_rng_state(state),
        ),
        ("MXFP8 dequantize", f"{te}.tensor.storage.mxfp8_tensor_storage", "_FromMXFP8Func.forward", _dequantized),
        ("NVFP4 dequantize", f"{te}.tensor.storage.nvfp4_tensor_storage", "_FromNVFP4Func.forward", _dequantized),
        (
            "TransformerEngineBaseModule.__init__",
            f"{te}.module.base",
            "TransformerEngineBaseModule.__init__",
            _WITH_CUDA,
        ),
        (
            "TransformerEngineBaseModule.prepare_forward",
            f"{te}.module.base",
            "TransformerEngineBaseModule.prepare_forward",
            _entered_on_cuda,
        ),
        ("DotProductAttention.forward", f"{te}.attention", "DotProductAttention.forward", _ON_CUDA),
    ]
    reasons = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    made = (
        Patch(row=row, module=module, path=path, replace=replace, **reasons[row]) for row, module, path, replace in rows
    )
    return tuple(row for row in made if release in row.releases)
