"""`StopRequest`: the first Ctrl-C or SIGTERM ends a run between two steps, and not at once.

A scheduler, and a terminal, send a signal to the launcher and its workers. torchrun also forwards
it to the workers, so that each worker gets it twice. A second signal within `COPY_SECONDS` is
therefore the same request.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

COPY_SECONDS = 10.0
"""Seconds after the first signal in which a second signal is the launcher's copy of it."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """The signal that asked this process to stop."""

    number = 0
    """Number of the first signal. 0: no signal came."""
    is_noted_only = False
    """Whether the first signal is only noted, by a loop that reads `number` or by a dying process.

    A launcher stops the other ranks when a rank has ended. They have to write why they end first.
    """
    _noted_at = 0.0
    _has_copy = False

    def __call__(self) -> int:
        """Return the number."""
        return self.number

    def note(self, number: int) -> bool:
        """Note a signal, and return whether it is this request or its copy.

        Any other signal has to end the process.
        """
        if self.is_noted_only and not self.number:
            self.number = number
            self._noted_at = time.monotonic()
            return True
        is_late = time.monotonic() - self._noted_at > COPY_SECONDS
        if not self.number or self._has_copy or is_late:
            return False
        self._has_copy = True
        return True


@contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Let a `StopRequest` note SIGINT and SIGTERM in a ``with`` block, once `is_noted_only` is set.

    A signal that is not noted has the effect that it had before the block. Outside of the main
    thread Python allows no signal handlers, and nothing is changed.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def handle(number: int, _frame: FrameType | None) -> None:
        if not request.note(number):
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)

    for number in _SIGNALS:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
