"""`cpu_as_cuda`, the CUDA shim: runs Megatron Core, which requests "cuda", without CUDA.

Megatron creates tensors with ``device="cuda"``, compares ``tensor.type()`` with
``torch.cuda.FloatTensor``, keeps its random number states in CUDA generators, and opens
``torch.autocast("cuda")``. Each row of `CUDA_PATCHES` replaces a callable while the shim is
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

from bridge.runtime.megatron.patching import (
    PatchTable,
    apply_patches,
    log_skipped_patch,
    redirect_to_cpu,
    replace_by_constant,
    replace_rng_getter,
    replace_rng_setter,
    resolve_patches,
)

_CPU = torch.device("cpu")
_shim_installed: list[bool] = []


def has_cuda() -> bool:
    """Return whether this process can use a CUDA device."""
    return torch.cuda.is_available()


def is_shim_installed() -> bool:
    """Return whether the shim is in place."""
    return bool(_shim_installed)


def _replace_tensor_type(_original: object) -> Callable[..., Any]:
    """Replace `Tensor.type()`: without arguments it returns the name of CUDA's type."""

    def get_cuda_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return torch._C.TensorBase.type(self, dtype, *args, **kwargs)
        name = str(torch._C.TensorBase.type(self))
        if name.startswith("torch.cuda."):
            return name
        return name.replace("torch.", "torch.cuda.", 1)

    return get_cuda_type


def _replace_autocast_query(query: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a query of autocast: "cuda" is the CPU, and also the default."""
    query_cpu = redirect_to_cpu(query)

    def query_with_default(*args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return query_cpu(*args, **kwargs)
        return query_cpu("cuda")

    return query_with_default


_NO_OP_STREAM = SimpleNamespace(
    wait_event=lambda *_: None, wait_stream=lambda *_: None, synchronize=lambda *_: None
)
"""A stream of a device that executes everything in order."""
_NO_OP_STREAM.record_event = lambda *_: _NO_OP_STREAM


def _replace_move_to_cpu(move: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `maybe_move_tensor_to_cpu`: a tensor is on the CPU already, and may become an array.

    Megatron's function converts only tensors on CUDA to NumPy.
    """

    @functools.wraps(move)
    def convert_if_wanted(tensor: Any, as_numpy: bool = False, *_stream: Any, **_named: Any) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return tensor

    return convert_if_wanted


def _replace_p2p_ops(send: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `_p2p_ops`: it sends aliases of the tensors.

    Gloo reads a tensor after Megatron has emptied it through ``.data``. An alias keeps the memory.
    """

    @functools.wraps(send)
    def send_aliases(*, tensor_send_prev: Any, tensor_send_next: Any, **others: Any) -> Any:
        return send(
            tensor_send_prev=_make_alias(tensor_send_prev),
            tensor_send_next=_make_alias(tensor_send_next),
            **others,
        )

    return send_aliases


def _make_alias(tensor: Any) -> Any:
    """Return a tensor that shares memory with a tensor, or None for None."""
    if tensor is None:
        return None
    return tensor.detach()


def _replace_collective(reduce_or_gather: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a collective: in a group of one rank it does nothing if result and input are the same.

    NCCL does nothing in this case, and gloo copies the tensor.
    """

    @functools.wraps(reduce_or_gather)
    def skip_if_alone(*tensors: Any, **named: Any) -> Any:
        group = named.get("group")
        is_alone = group is not None and group.size() == 1 and not named.get("async_op")
        if is_alone and len(tensors) == 2 and tensors[0].data_ptr() == tensors[1].data_ptr():
            return None
        return reduce_or_gather(*tensors, **named)

    return skip_if_alone


def _replace_gloo_init(start: Callable[..., None]) -> Callable[..., None]:
    """Replace `ProcessGroupGloo.__init__`: all groups share one device of gloo.

    A device has a thread that wakes up every 10 ms, and torch makes a device per group.
    """
    gloo: Any = torch.distributed.ProcessGroupGloo
    get_shared_device = functools.cache(gloo.create_default_device)

    def start_with_shared_device(
        self: Any, *args: Any, timeout: timedelta | None = None, **others: Any
    ) -> None:
        if timeout is None:  # a call with an options object
            start(self, *args, **others)
            return
        if len(args) != 3:  # a call of another release
            start(self, *args, timeout=timeout, **others)
            return
        options = gloo._Options()  # noqa: SLF001  torch gives these no public names
        values = {
            "_devices": [get_shared_device()],
            "_threads": 1,
            "_timeout": timeout,
            **others,
        }
        unknown = [name for name in values if not hasattr(options, name)]
        if unknown:
            reason = f"its options have no {', '.join(unknown)}"
            log_skipped_patch("torch.distributed.ProcessGroupGloo.__init__", reason)
            start(self, *args, timeout=timeout, **others)
            return
        for name, value in values.items():
            setattr(options, name, value)
        start(self, *args, options)

    return start_with_shared_device


CUDA_PATCHES: PatchTable = {
    "torch.tensor": redirect_to_cpu,
    "torch.zeros": redirect_to_cpu,
    "torch.ones": redirect_to_cpu,
    "torch.empty": redirect_to_cpu,
    "torch.full": redirect_to_cpu,
    "torch.arange": redirect_to_cpu,
    "torch.Tensor.type": _replace_tensor_type,
    "torch.Tensor.cuda": lambda _original: lambda self, *_args, **_kwargs: self,
    "torch.cuda.current_device": replace_by_constant(_CPU),
    "torch.cuda.synchronize": replace_by_constant(None),
    "torch.cuda.current_stream": replace_by_constant(_NO_OP_STREAM),
    "torch.cuda.Stream": replace_by_constant(_NO_OP_STREAM),
    "torch.cuda.stream": replace_by_constant(nullcontext()),
    "torch.cuda.get_rng_state": replace_rng_getter,
    # `torch.manual_seed` is not called: it queues a seed for CUDA at each call, with the stack of
    # the call.
    "torch.cuda.manual_seed": lambda _original: torch.default_generator.manual_seed,
    "megatron.core.tensor_parallel.random._get_cuda_rng_state": replace_rng_getter,
    "megatron.core.tensor_parallel.random._set_cuda_rng_state": replace_rng_setter,
    "megatron.core.pipeline_parallel.p2p_communication._p2p_ops": _replace_p2p_ops,
    "megatron.core.distributed.param_and_grad_buffer.dist_reduce_scatter_func": _replace_collective,
    "megatron.core.distributed.param_and_grad_buffer.dist_all_gather_func": _replace_collective,
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": _replace_move_to_cpu,
    "torch.distributed.ProcessGroupGloo.__init__": _replace_gloo_init,
    # a subclass would miss names bound at import
    "torch.amp.autocast_mode.autocast.__init__": redirect_to_cpu,
    "torch.is_autocast_enabled": _replace_autocast_query,
    "torch.get_autocast_dtype": _replace_autocast_query,
}
"""Callable -> function from the original to the replacement.

cuda_shim.yaml has the caller of each callable, and the failure without the replacement.
"""


@contextmanager
def cpu_as_cuda() -> Iterator[None]:
    """Install the shim for a ``with`` block. Of nested blocks the outermost removes it.

    On a machine with CUDA the block changes nothing.
    """
    if has_cuda() or is_shim_installed():
        yield
        return
    with apply_patches(resolve_patches(CUDA_PATCHES)):
        _shim_installed.append(True)
        try:
            yield
        finally:
            _shim_installed.clear()
