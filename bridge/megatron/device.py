"""CPU device shim: runs Megatron Core, which asks for "cuda" in many places, on a machine without it.

Megatron creates tensors with ``device="cuda"``, asks ``tensor.type()`` for ``torch.cuda.FloatTensor``, keeps its random
number states in CUDA generators and opens ``torch.autocast("cuda")``. Each row of `patches()` replaces one callable in
place while the shim is installed; nothing intercepts operators, so a training step costs what it costs without it.
Where CUDA is present, installing is a no-op.

The shim has to stay installed while training: schedules and optimizer steps create tensors on "cuda" too.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import random as megatron_random

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Patch", "cpu_as_cuda", "has_cuda", "install", "is_installed", "patches", "uninstall"]

_CPU = torch.device("cpu")
_ABSENT = object()
_undo: list[Callable[[], None]] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """One callable of torch or Megatron and its replacement."""

    owner: Any
    name: str
    replace: Callable[[Any], Any]
    """Original -> replacement."""
    needed_by: str
    """A place in megatron/core that would not work (0.16.1 line numbers)."""
    without: str
    """The failure without this row."""


def has_cuda() -> bool:
    """Return whether this process can use a CUDA device."""
    return torch.cuda.is_available()


def is_installed() -> bool:
    """Return whether the shim is in place."""
    return bool(_undo)


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _on_cpu(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a factory function so that ``device="cuda"`` means the CPU."""

    @functools.wraps(create)
    def created(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return create(*args, **kwargs)

    return created


def _cuda_type_name(_original: object) -> Callable[..., Any]:
    """`Tensor.type()` without arguments: Megatron compares it with the names of CUDA tensor types."""

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return torch._C.TensorBase.type(self, dtype, *args, **kwargs)
        name = str(torch._C.TensorBase.type(self))
        return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)

    return type_


def _autocast_on_cpu(initialise: Callable[..., None]) -> Callable[..., None]:
    """`autocast.__init__` for which "cuda" means "cpu"; a subclass would miss names bound at import."""

    @functools.wraps(initialise)
    def initialised(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        initialise(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return initialised


def _asked_about_cpu(query: Callable[..., Any]) -> Callable[..., Any]:
    """An autocast query for which "cuda", also as the default, means "cpu"."""

    @functools.wraps(query)
    def answered(device_type: str = "cuda") -> Any:
        return query("cpu" if device_type == "cuda" else device_type)

    return answered


def _always(value: Any) -> Callable[[Any], Callable[..., Any]]:
    """A replacement that ignores its arguments and returns `value`."""
    return lambda _original: lambda *_args, **_kwargs: value


def _seed_default_generator(_original: object) -> Callable[[int], None]:
    """Not `torch.manual_seed`: that queues a seed for CUDA at each call, with the stack it was called from."""

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    return manual_seed


class _Stream:
    """A stream on a device that does things in order anyway."""

    def wait_event(self, _event: object) -> None:
        """Nothing to wait for."""

    def wait_stream(self, _stream: object) -> None:
        """Nothing to wait for."""


_FACTORIES = {
    "tensor": ("optimizer/optimizer.py:473, optimizer/grad_scaler.py:15", "AssertionError building the optimizer"),
    "zeros": ("pipeline_parallel/schedules.py:596, optimizer/clip_grads.py:108", "AssertionError in the schedule"),
    "ones": ("transformer/utils.py:33, the default causal mask", "AssertionError in attention"),
    "empty": ("dist_checkpointing/exchange_utils.py:98", "AssertionError loading a fully parallel checkpoint"),
    "full": ("tensor_parallel/data.py", "AssertionError; not hit by GPT training, kept with its siblings"),
    "arange": ("models/common/embeddings/rotary_pos_embedding.py:305", "AssertionError with multimodal RoPE"),
}


def patches() -> tuple[Patch, ...]:
    """Return every replacement the shim makes, in order."""
    factories = (
        Patch(owner=torch, name=name, replace=_on_cpu, needed_by=needed_by, without=without)
        for name, (needed_by, without) in _FACTORIES.items()
    )
    return (
        *factories,
        Patch(
            owner=torch.Tensor,
            name="type",
            replace=_cuda_type_name,
            needed_by="optimizer/optimizer.py:671, optimizer/distrib_optimizer.py:361, optimizer/clip_grads.py:167",
            without="TypeError building the optimizer, AssertionError clipping gradients",
        ),
        Patch(
            owner=torch.Tensor,
            name="cuda",
            replace=lambda _original: lambda self, *_args, **_kwargs: self,
            needed_by="models/common/language_module/language_module.py:244, optimizer/grad_scaler.py:140",
            without="AssertionError with tied embeddings under PP and when an FP16 run is resumed",
        ),
        Patch(
            owner=torch.cuda,
            name="current_device",
            replace=_always(_CPU),
            needed_by="distributed/param_and_grad_buffer.py:783, tensor_parallel/mappings.py, p2p_communication.py:190",
            without="AssertionError in the constructor of DistributedDataParallel",
        ),
        Patch(
            owner=torch.cuda,
            name="synchronize",
            replace=_always(None),
            needed_by="pipeline_parallel/p2p_communication.py:242, dist_checkpointing's filesystem_async.py:230",
            without="AssertionError under PP and in checkpoints",
        ),
        Patch(
            owner=torch.cuda,
            name="current_stream",
            replace=_always(_Stream()),
            needed_by="distributed/param_and_grad_buffer.py:632 (0.19.2)",
            without="RuntimeError when gradients are reduced, with 0.17 and later",
        ),
        Patch(
            owner=torch.cuda,
            name="get_rng_state",
            replace=lambda _original: lambda *_args, **_kwargs: torch.get_rng_state(),
            needed_by="tensor_parallel/random.py:235",
            without="AssertionError seeding",
        ),
        Patch(
            owner=torch.cuda,
            name="manual_seed",
            replace=_seed_default_generator,
            needed_by="tensor_parallel/random.py:237",
            without="SILENT: seeds are queued for a CUDA start that never comes, all tracked states are equal",
        ),
        Patch(
            owner=megatron_random,
            name="_get_cuda_rng_state",
            replace=lambda _original: lambda *_args, **_kwargs: torch.get_rng_state(),
            needed_by="tensor_parallel/random.py:55",
            without="AssertionError in dropout and weight initialisation",
        ),
        Patch(
            owner=megatron_random,
            name="_set_cuda_rng_state",
            replace=lambda _original: lambda new_state, *_args, **_kwargs: torch.set_rng_state(new_state),
            needed_by="tensor_parallel/random.py:111",
            without="SILENT: the state is queued, never restored, and dropout differs between ranks and on recompute",
        ),
        Patch(
            owner=torch.amp.autocast_mode.autocast,
            name="__init__",
            replace=_autocast_on_cpu,
            needed_by="pipeline_parallel/schedules.py:418, tensor_parallel/layers.py:498 (custom_bwd)",
            without="SILENT: enable_autocast has no effect, the run is plain FP32",
        ),
        Patch(
            owner=torch,
            name="is_autocast_enabled",
            replace=_asked_about_cpu,
            needed_by="tensor_parallel/layers.py:442 (custom_fwd)",
            without="RuntimeError in the backward GEMMs: BF16 gradients meet FP32 weights",
        ),
        Patch(
            owner=torch,
            name="get_autocast_dtype",
            replace=_asked_about_cpu,
            needed_by="tensor_parallel/layers.py:442 (custom_fwd)",
            without="SILENT: backward autocasts to FP16, torch's default for CUDA, instead of the forward's dtype",
        ),
    )


def _apply(patch: Patch) -> Callable[[], None]:
    """Make one replacement; return the function that takes it back."""
    own = vars(patch.owner).get(patch.name, _ABSENT)
    setattr(patch.owner, patch.name, patch.replace(getattr(patch.owner, patch.name)))
    if own is _ABSENT:
        return lambda: delattr(patch.owner, patch.name)
    return lambda: setattr(patch.owner, patch.name, own)


def install() -> bool:
    """Install the shim; return False where there is nothing to do: CUDA is there, or it is installed already."""
    if has_cuda() or is_installed():
        return False
    _undo.extend(_apply(patch) for patch in patches())
    return True


def uninstall() -> None:
    """Take every replacement back, last first; a no-op if the shim is not installed."""
    while _undo:
        _undo.pop()()


@contextmanager
def cpu_as_cuda() -> Iterator[None]:
    """Keep the shim installed for the length of a ``with`` block; the outermost block removes it."""
    mine = install()
    try:
        yield
    finally:
        if mine:
            uninstall()
