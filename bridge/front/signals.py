"""Signals that end a command: Ctrl-C and a scheduler's SIGTERM.

The exit code is 128 + the number of the signal: 130 after Ctrl-C, 143 after SIGTERM. During training the loop takes the
signal over: it ends after the running step, with everything written, and the exit code is the same.
"""

import signal
import sys
import threading
from types import FrameType


def exit_on_signals() -> None:
    """End the process without a traceback when a signal arrives, from now on; elsewhere than the main thread nothing.

    A signal that the caller's shell ignores stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _exit)


def _exit(number: int, _frame: FrameType | None) -> None:
    sys.stderr.write("Stopped on request.\n")
    sys.exit(128 + number)
