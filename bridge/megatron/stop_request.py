"""`StopRequest`: the first Ctrl-C or SIGTERM of a run that trains or ends, which never interrupts it half way."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """The signal that asked this process to stop.

    Attributes:
        number: Number of the first signal, 0 for none.
        is_noted_only: Whether the first signal is only noted. A loop sets it when it begins to look at `number`, and a
            process that ends with an error sets it too: a launcher that has seen one rank end stops the others, which
            must still say why they end.
    """

    number = 0
    is_noted_only = False

    def __call__(self) -> int:
        """Return the number."""
        return self.number


@contextmanager
def noted_signals() -> Iterator[StopRequest]:
    """Note SIGINT and SIGTERM for the length of a ``with`` block; a second one acts as it did before the block.

    Until `is_noted_only` is set, the first one acts as before too. Outside the main thread, where Python allows no
    signal handlers, nothing is changed.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def note(number: int, _frame: FrameType | None) -> None:
        if request.is_noted_only and not request.number:
            request.number = number
            return
        signal.signal(number, before[signal.Signals(number)])
        signal.raise_signal(number)

    for number in _SIGNALS:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
