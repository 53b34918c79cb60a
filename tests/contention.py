"""CPU time of work on a machine that does other work too."""

from __future__ import annotations

import os

__all__ = ["allowed"]


def allowed(seconds: float) -> float:
    """Return the CPU seconds that work of `seconds` may take now: hyper-threads share a core and its caches."""
    return seconds * (1 + 0.5 * max(0.0, os.getloadavg()[0] / (os.cpu_count() or 1) - 1))
