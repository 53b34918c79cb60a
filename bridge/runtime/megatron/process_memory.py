"""Memory of this process: free memory that goes back to the system, and the peak of a run."""

import ctypes
import re
from contextlib import suppress
from pathlib import Path

import torch

from bridge.runtime.megatron.cuda_shim import has_cuda

_PROC_SELF = Path("/proc/self")
_RESET_PEAK = "5"
"""Written to ``clear_refs`` it sets the peak of the resident memory to the present memory.

Source: Linux, man 5 proc.
"""


def trim_heap() -> None:
    """Give freed memory of the C library's heap back to the system.

    It needs glibc, and no CUDA device. Tensors on a CPU come from an aligned allocation that glibc
    often cannot place into the hole the last one of the same size left: without this the heap of a
    run grew by as much as a layer's operands with each step.
    """
    if has_cuda():
        return
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def reset_peak_memory() -> None:
    """Begin to measure the peak memory, without that of earlier runs of this process."""
    if has_cuda():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # another system
        (_PROC_SELF / "clear_refs").write_text(_RESET_PEAK, encoding="ascii")


def read_peak_memory() -> int | None:
    """Return the peak memory of the run in bytes, None where the system does not count it.

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
