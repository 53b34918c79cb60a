"""`StopRequest`: the first Ctrl-C or SIGTERM of a run that trains or ends, which never interrupts it half way.

A scheduler that signals a whole job, and a terminal, reach the launcher and its workers, and torchrun forwards its own
signal to the workers: each has it twice. So a second signal within `COPY_SECONDS` is the same request.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

COPY_SECONDS = 10.0
"""How long after the first signal a second one counts as the launcher's copy of it."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """The signal that asked this process to stop."""

    number = 0
    """Number of the first signal, 0 for none."""
    is_noted_only = False
    """Whether the first signal is only noted: by a loop that looks at `number`, or a process that ends with an error.

    A launcher that has seen one rank end stops the others, which must still say why they end.
    """
    _noted_at = 0.0
    _has_copy = False

    def __call__(self) -> int:
        """Return the number."""
        return self.number

    def note(self, number: int) -> bool:
        """Return whether a signal is this request, or the launcher's one copy of it; any other ends the process."""
        if self.is_noted_only and not self.number:
            self.number, self._noted_at = number, time.monotonic()
            return True
        if not self.number or self._has_copy or time.monotonic() - self._noted_at > COPY_SECONDS:
            return False
        self._has_copy = True
        return True


@contextmanager
def noted_signals() -> Iterator[StopRequest]:
    """Note SIGINT and SIGTERM for the length of a ``with`` block; one that is not noted acts as before the block.

    Until `is_noted_only` is set, none is noted. Outside the main thread, where Python allows no signal handlers,
    nothing is changed.
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
