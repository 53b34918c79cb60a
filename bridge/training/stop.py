"""Ending a run between two steps, on Ctrl-C or when the scheduler asks for it."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["stop_on_signal"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """Turn the first SIGINT or SIGTERM of a ``with`` block into a request; a second one acts as it always does.

    A step is never interrupted half way, so what is saved afterwards is whole. Outside the main thread, where Python
    allows no signal handlers, nothing is changed.
    """
    request = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def ask(number: int, _frame: FrameType | None) -> None:
        request.set()
        signal.signal(number, before[signal.Signals(number)])

    for number in _SIGNALS:
        signal.signal(number, ask)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
