"""How much a piece of work does, on any machine and beside any neighbour: its calls, never its seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

__all__ = ["calls"]


def calls(work: Callable[[], object]) -> int:
    """Return how many functions `work` calls, Python's and C's: a million of them take about a second."""
    count = 0

    def counted(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
