"""Functions that return freed memory to the system, and read the peak memory of a run."""

import ctypes
import re
from contextlib import suppress
from pathlib import Path

import torch

from bridge.runtime.megatron.cpu.cuda_shim import has_cuda

_PROC_SELF = Path("/proc/self")
_RESET_PEAK = "5"
"""Written to ``clear_refs`` it sets the peak of the resident memory to the present memory.

Source: Linux, man 5 proc.
"""


def trim_heap() -> None:
    """Return freed memory of the C library's heap to the system. Only glibc supports this.

    Tensors on a CPU are aligned allocations. glibc often cannot place a tensor into the hole that a
    freed tensor of the same size left. Without this call the heap of a run grew in each step by the
    size of a layer's operands. With CUDA the tensors are not in this heap.
    """
    if has_cuda():
        return
    with suppress(AttributeError, OSError):  # a C library without malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def reset_peak_memory() -> None:
    """Begin to measure the peak memory, without the peak of earlier runs of this process."""
    if has_cuda():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # a system without /proc
        (_PROC_SELF / "clear_refs").write_text(_RESET_PEAK, encoding="ascii")


def read_peak_memory() -> int | None:
    """Return the peak memory of the run in bytes, or None if the system does not count it.

    With CUDA it is the memory of the GPU, otherwise the resident memory of the process.
    """
    if has_cuda():
        return torch.cuda.max_memory_allocated()
    try:
        status = (_PROC_SELF / "status").read_text(encoding="ascii")
    except OSError:
        return None
    high_water_mark = re.search(r"VmHWM:\s+(\d+) kB", status)
    if high_water_mark is None:
        return None
    return 1024 * int(high_water_mark[1])
