"""Most memory that a run holds at a time: on its GPU, or else in its process."""

import re
from contextlib import suppress
from pathlib import Path

import torch

from bridge.megatron import device

_PROCESS = Path("/proc/self")
_RESET = "5"
"""Written to ``clear_refs`` it sets the high-water mark to the memory held now (Linux, man 5 proc)."""


def start_peak_memory() -> None:
    """Forget the peak of an earlier run in this process."""
    if device.has_cuda():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # another system
        (_PROCESS / "clear_refs").write_text(_RESET, encoding="ascii")


def peak_memory() -> int | None:
    """Return the most bytes since the start, None where the system does not count."""
    if device.has_cuda():
        return torch.cuda.max_memory_allocated()
    try:
        status = (_PROCESS / "status").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return 1024 * int(found[1]) if found else None
