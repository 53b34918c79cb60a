"""CPU device shim: runs Megatron Core, which asks for "cuda" in many places, on a machine without it.

Megatron creates tensors with ``device="cuda"``, asks ``tensor.type()`` for ``torch.cuda.FloatTensor``, keeps its random
number states in CUDA generators and opens ``torch.autocast("cuda")``. Each row of `REPLACEMENTS` replaces one callable
while the shim is installed; nothing intercepts operators, so a training step costs what it costs without it.
Where CUDA is present, installing is a no-op.

The shim has to stay installed while training: schedules and optimizer steps create tensors on "cuda" too.
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
    """`Tensor.type()` without arguments: Megatron compares it with the names of CUDA tensor types."""

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return torch._C.TensorBase.type(self, dtype, *args, **kwargs)
        name = str(torch._C.TensorBase.type(self))
        return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)

    return type_


def _asked_about_cpu(query: Callable[..., Any]) -> Callable[..., Any]:
    """An autocast query for which "cuda", which is the default too, means the CPU."""
    asked = on_cpu(query)
    return lambda *args, **kwargs: asked(*args, **kwargs) if args or kwargs else asked("cuda")


_STREAM = SimpleNamespace(
    **dict.fromkeys(("wait_event", "wait_stream", "synchronize"), lambda *_: None)
)
"""A stream of a device that does things in order anyway."""
_STREAM.record_event = lambda *_: _STREAM


def _to_numpy_too(move: Callable[..., Any]) -> Callable[..., Any]:
    """`maybe_move_tensor_to_cpu` that converts a tensor on the CPU too, as its callers expect."""

    @functools.wraps(move)
    def moved(tensor: Any, as_numpy: bool = False, *_stream: Any, **_named: Any) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return moved


def _of_aliases(send: Callable[..., Any]) -> Callable[..., Any]:
    """`_p2p_ops` that sends aliases: gloo reads a tensor after Megatron has emptied it through ``.data``."""

    @functools.wraps(send)
    def sent(*, tensor_send_prev: Any, tensor_send_next: Any, **others: Any) -> Any:
        previous, following = (
            None if tensor is None else tensor.detach()
            for tensor in (tensor_send_prev, tensor_send_next)
        )
        return send(tensor_send_prev=previous, tensor_send_next=following, **others)

    return sent


def _in_place(reduce_or_gather: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that moves nothing where the one rank's result is its own tensor, as NCCL's does; gloo copies it."""

    @functools.wraps(reduce_or_gather)
    def moved(*tensors: Any, **named: Any) -> Any:
        group = named.get("group")
        is_alone = group is not None and group.size() == 1 and not named.get("async_op")
        if is_alone and len(tensors) == 2 and tensors[0].data_ptr() == tensors[1].data_ptr():
            return None
        return reduce_or_gather(*tensors, **named)

    return moved


def _of_one_loop(start: Callable[..., None]) -> Callable[..., None]:
    """`ProcessGroupGloo.__init__` whose groups share the thread that wakes each 10 ms; torch starts one per group."""
    gloo: Any = torch.distributed.ProcessGroupGloo
    shared = functools.cache(gloo.create_default_device)

    def started(self: Any, *args: Any, timeout: timedelta | None = None, **others: Any) -> None:
        if (
            timeout is None or len(args) != 3
        ):  # a call with options of its own, or of another release
            start(self, *args, **({} if timeout is None else {"timeout": timeout}), **others)
            return
        options = gloo._Options()  # noqa: SLF001  torch gives these no public names
        values = {"_devices": [shared()], "_threads": 1, "_timeout": timeout, **others}
        unknown = [name for name in values if not hasattr(options, name)]
        if unknown:
            log_left_out(
                "torch.distributed.ProcessGroupGloo.__init__",
                f"its options have no {', '.join(unknown)}",
            )
            start(self, *args, timeout=timeout, **others)
            return
        for name, value in values.items():
            setattr(options, name, value)
        start(self, *args, options)

    return started


REPLACEMENTS: Rows = {
    **{f"torch.{name}": on_cpu for name in ("tensor", "zeros", "ones", "empty", "full", "arange")},
    "torch.Tensor.type": _cuda_type_name,
    "torch.Tensor.cuda": lambda _original: lambda self, *_args, **_kwargs: self,
    "torch.cuda.current_device": always(_CPU),
    "torch.cuda.synchronize": always(None),
    "torch.cuda.current_stream": always(_STREAM),
    "torch.cuda.Stream": always(_STREAM),
    "torch.cuda.stream": always(nullcontext()),
    "torch.cuda.get_rng_state": rng_state,
    # Not `torch.manual_seed`: that queues a seed for CUDA at each call, with the stack it was called from.
    "torch.cuda.manual_seed": lambda _original: torch.default_generator.manual_seed,
    "megatron.core.tensor_parallel.random._get_cuda_rng_state": rng_state,
    "megatron.core.tensor_parallel.random._set_cuda_rng_state": set_rng_state,
    "megatron.core.pipeline_parallel.p2p_communication._p2p_ops": _of_aliases,
    "megatron.core.distributed.param_and_grad_buffer.dist_reduce_scatter_func": _in_place,
    "megatron.core.distributed.param_and_grad_buffer.dist_all_gather_func": _in_place,
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": _to_numpy_too,
    "torch.distributed.ProcessGroupGloo.__init__": _of_one_loop,
    "torch.amp.autocast_mode.autocast.__init__": on_cpu,  # a subclass would miss names bound at import
    "torch.is_autocast_enabled": _asked_about_cpu,
    "torch.get_autocast_dtype": _asked_about_cpu,
}
"""Callable -> original -> replacement; device.yaml says who needs each, and the failure without."""


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
