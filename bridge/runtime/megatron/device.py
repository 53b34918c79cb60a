"""CPU device shim: runs Megatron Core, which asks for "cuda", on a machine without it.

Megatron creates tensors with ``device="cuda"``, compares ``tensor.type()`` with
``torch.cuda.FloatTensor``, keeps its random number states in CUDA generators and opens
``torch.autocast("cuda")``. Each row of `REPLACEMENTS` replaces a callable while the shim is
installed. No operator is intercepted, so that a training step is as fast as without the shim. On a
machine with CUDA the shim changes nothing.

The shim stays installed during training, since schedules and optimizer steps create tensors on
"cuda" too.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch

from bridge.runtime.megatron.replacement import (
    Rows,
    always,
    changes,
    log_left_out,
    on_cpu,
    replaced,
    rng_state,
    set_rng_state,
)

_CPU = torch.device("cpu")
_installed: list[bool] = []


def has_cuda() -> bool:
    """Return whether this process can use a CUDA device."""
    return torch.cuda.is_available()


def is_installed() -> bool:
    """Return whether the shim is in place."""
    return bool(_installed)


def _cuda_type_name(_original: object) -> Callable[..., Any]:
    """Replace `Tensor.type()`: without arguments it returns the name of CUDA's type."""

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return torch._C.TensorBase.type(self, dtype, *args, **kwargs)
        name = str(torch._C.TensorBase.type(self))
        if name.startswith("torch.cuda."):
            return name
        return name.replace("torch.", "torch.cuda.", 1)

    return type_


def _asked_about_cpu(query: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a query of autocast: "cuda", which is the default too, is the CPU."""
    on_device = on_cpu(query)

    def asked(*args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return on_device(*args, **kwargs)
        return on_device("cuda")

    return asked


_STREAM = SimpleNamespace(
    wait_event=lambda *_: None, wait_stream=lambda *_: None, synchronize=lambda *_: None
)
"""A stream of a device that executes everything in order."""
_STREAM.record_event = lambda *_: _STREAM


def _to_numpy_too(move: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `maybe_move_tensor_to_cpu`: it converts a tensor on the CPU to NumPy too."""

    @functools.wraps(move)
    def moved(tensor: Any, as_numpy: bool = False, *_stream: Any, **_named: Any) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return tensor

    return moved


def _of_aliases(send: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `_p2p_ops`: it sends aliases of the tensors.

    Gloo reads a tensor after Megatron has emptied it through ``.data``.
    """

    @functools.wraps(send)
    def sent(*, tensor_send_prev: Any, tensor_send_next: Any, **others: Any) -> Any:
        return send(
            tensor_send_prev=_alias(tensor_send_prev),
            tensor_send_next=_alias(tensor_send_next),
            **others,
        )

    return sent


def _alias(tensor: Any) -> Any:
    """Return a tensor that shares memory with a tensor, None for None."""
    if tensor is None:
        return None
    return tensor.detach()


def _in_place(reduce_or_gather: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a collective: in a group of one rank it does nothing if result and input are the same.

    NCCL does so, and gloo copies the tensor.
    """

    @functools.wraps(reduce_or_gather)
    def moved(*tensors: Any, **named: Any) -> Any:
        group = named.get("group")
        is_alone = group is not None and group.size() == 1 and not named.get("async_op")
        if is_alone and len(tensors) == 2 and tensors[0].data_ptr() == tensors[1].data_ptr():
            return None
        return reduce_or_gather(*tensors, **named)

    return moved


def _of_one_loop(start: Callable[..., None]) -> Callable[..., None]:
    """Replace `ProcessGroupGloo.__init__`: all groups share the thread that wakes each 10 ms.

    Torch starts such a thread per group.
    """
    gloo: Any = torch.distributed.ProcessGroupGloo
    shared = functools.cache(gloo.create_default_device)

    def started(self: Any, *args: Any, timeout: timedelta | None = None, **others: Any) -> None:
        if timeout is None:  # a call with options of its own
            start(self, *args, **others)
            return
        if len(args) != 3:  # a call of another release
            start(self, *args, timeout=timeout, **others)
            return
        options = gloo._Options()  # noqa: SLF001  torch gives these no public names
        values = {"_devices": [shared()], "_threads": 1, "_timeout": timeout, **others}
        unknown = [name for name in values if not hasattr(options, name)]
        if unknown:
            reason = f"its options have no {', '.join(unknown)}"
            log_left_out("torch.distributed.ProcessGroupGloo.__init__", reason)
            start(self, *args, timeout=timeout, **others)
            return
        for name, value in values.items():
            setattr(options, name, value)
        start(self, *args, options)

    return started


REPLACEMENTS: Rows = {
    "torch.tensor": on_cpu,
    "torch.zeros": on_cpu,
    "torch.ones": on_cpu,
    "torch.empty": on_cpu,
    "torch.full": on_cpu,
    "torch.arange": on_cpu,
    "torch.Tensor.type": _cuda_type_name,
    "torch.Tensor.cuda": lambda _original: lambda self, *_args, **_kwargs: self,
    "torch.cuda.current_device": always(_CPU),
    "torch.cuda.synchronize": always(None),
    "torch.cuda.current_stream": always(_STREAM),
    "torch.cuda.Stream": always(_STREAM),
    "torch.cuda.stream": always(nullcontext()),
    "torch.cuda.get_rng_state": rng_state,
    # Not `torch.manual_seed`: that queues a seed for CUDA at each call, with the stack it was
    # called from.
    "torch.cuda.manual_seed": lambda _original: torch.default_generator.manual_seed,
    "megatron.core.tensor_parallel.random._get_cuda_rng_state": rng_state,
    "megatron.core.tensor_parallel.random._set_cuda_rng_state": set_rng_state,
    "megatron.core.pipeline_parallel.p2p_communication._p2p_ops": _of_aliases,
    "megatron.core.distributed.param_and_grad_buffer.dist_reduce_scatter_func": _in_place,
    "megatron.core.distributed.param_and_grad_buffer.dist_all_gather_func": _in_place,
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": _to_numpy_too,
    "torch.distributed.ProcessGroupGloo.__init__": _of_one_loop,
    # a subclass would miss names bound at import
    "torch.amp.autocast_mode.autocast.__init__": on_cpu,
    "torch.is_autocast_enabled": _asked_about_cpu,
    "torch.get_autocast_dtype": _asked_about_cpu,
}
"""Callable -> original -> replacement. device.yaml has the caller of each, and the failure without."""


@contextmanager
def cpu_as_cuda() -> Iterator[None]:
    """Keep the shim installed for the length of a ``with`` block; the outermost block removes it.

    Where CUDA is present, the block changes nothing.
    """
    if has_cuda() or is_installed():
        yield
        return
    with replaced(changes(REPLACEMENTS)):
        _installed.append(True)
        try:
            yield
        finally:
            _installed.clear()
