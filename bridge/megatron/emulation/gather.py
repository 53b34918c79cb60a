"""Gathering parameters of several dtypes with gloo, one collective per bucket.

Megatron gathers the buckets of a group in one coalesced collective, and puts FP8 codes and BF16 parameters into one
group. Gloo coalesces by copying everything into one tensor of one dtype: the codes are converted to numbers of that
dtype and back, and come out as other codes, without an error. NCCL sends each bucket as it is, and needs none of this.

Source: torch 2.13 ProcessGroupGloo, `allgather_into_tensor_coalesced`; megatron-core 0.16.1
distributed/param_and_grad_buffer.py:276-300.
"""

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from megatron.core.distributed import param_and_grad_buffer

from bridge.megatron.replacement import replaced


class _Works:
    """The handles of several asynchronous collectives, to be waited for as one."""

    def __init__(self) -> None:
        self.handles: list[Any] = []

    def wait(self) -> None:
        """Wait for all of them."""
        while self.handles:
            self.handles.pop().wait()


_WORKS: ContextVar[_Works | None] = ContextVar("gathers of one bucket group", default=None)


def separate_gathers() -> AbstractContextManager[None]:
    """Let Megatron's parameters be gathered bucket by bucket on gloo, for the length of a ``with`` block."""
    coalescing = param_and_grad_buffer._coalescing_manager
    gather = param_and_grad_buffer.dist_all_gather_func
    groups = param_and_grad_buffer._ParamAndGradBucketGroup
    start = groups.start_param_sync

    def start_param_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        uses_gloo = torch.distributed.get_backend(self.intra_distributed_optimizer_instance_group) == "gloo"
        token = _WORKS.set(_Works() if uses_gloo else None)
        try:
            return start(self, *args, **kwargs)
        finally:
            _WORKS.reset(token)

    def manager(*args: Any, **kwargs: Any) -> Any:
        works = _WORKS.get()
        return coalescing(*args, **kwargs) if works is None else nullcontext(works)

    def gathered(*args: Any, **kwargs: Any) -> Any:
        work, works = gather(*args, **kwargs), _WORKS.get()
        if work is not None and works is not None:
            works.handles.append(work)
        return work

    return replaced(
        [
            (groups, "start_param_sync", start_param_sync),
            (param_and_grad_buffer, "_coalescing_manager", manager),
            (param_and_grad_buffer, "dist_all_gather_func", gathered),
        ]
    )
