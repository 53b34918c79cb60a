"""Search for the rank that ended or stalled, outside of collectives, after a collective failed.

A rank that dies closes its connections, and a rank that stalls lets the collectives of other ranks
time out. On the other ranks either is an error of a collective, which names no rank. A rank with
such an error raises an alarm in the store of the launch, and a thread of each rank answers it. A rank
without an answer is dead or stopped. A rank that answers and has no error within the timeout is
stalled. The first rank that knows this writes the sentence with which all ranks end.

Each rank asks the store once a second, and less often in a launch of more than 5000 ranks, so that
the store answers at most 5000 questions a second.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from bridge.errors import TrainingError

T = TypeVar("T")

STORE_SECONDS = 30.0
"""How long a rank that ends waits for the store."""
POLLS_PER_SECOND = 5000
"""Most questions a second to the store, of all ranks together."""
MAX_NAMED_RANKS = 8
"""Ranks that a sentence names; the others are counted."""


def run_with_timeout(ask: Callable[[], T], seconds: float) -> T:
    """Return the answer of a store, whose clients would wait for ever if it stalls.

    Raises:
        DistError: The store does not answer in time.
    """
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:  # noqa: BLE001  raised in the caller's thread
            answer.set_exception(error)

    # an executor would wait for the thread at the end of the process
    threading.Thread(target=work, daemon=True).start()
    try:
        return answer.result(timeout=seconds)
    except TimeoutError:
        raise DistError("the store does not answer") from None


class Peers:
    """The other ranks of a launch, as this rank sees them in the store."""

    def __init__(self, store: Store, rank: int, ranks: int, timeout: timedelta) -> None:
        self.step = 0
        """The last step that this rank finished."""
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._timeout = timeout
        self._seconds = max(1.0, ranks / POLLS_PER_SECOND)
        self._marked = time.monotonic()
        self._answers = True
        """Whether the store answered whenever it was asked."""
        self._ended = threading.Event()

    @contextmanager
    def answer_alarms(self) -> Iterator[None]:
        """Answer the alarms of other ranks in a thread, for the length of a ``with`` block."""
        self._store.set(f"host {self._rank}", socket.gethostname())
        store: Any = self._store
        thread = threading.Thread(target=self._answer_alarm, args=(store.clone(),), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            with suppress(DistError):
                if self._answers:
                    self._ask_store(lambda: self._store.set(f"left {self._rank}", ""))
            if self._answers:
                thread.join()

    def finished(self, step: int) -> None:
        """Record the end of a step."""
        self.step = step
        self._marked = time.monotonic()

    def report_end(self, how: str) -> None:
        """Write why this rank ends, for the ranks whose collectives fail with it."""
        with suppress(DistError):
            sentence = f"ranks: rank {self._rank} ({socket.gethostname()}) {how}"
            self._store.compare_set("verdict", "", sentence)

    def diagnose_failure(self) -> TrainingError | None:
        """Return the error that names the ranks behind a failed collective.

        The result is None where no other rank is at fault.
        """
        waited = time.monotonic() - self._marked
        try:
            return self._ask_store(lambda: self._reach_verdict(waited))
        except DistError:
            return TrainingError(
                "ranks: the store of the launch must answer every rank, and no longer does. "
                "The first rank, or the agent of the launch, has ended or stalls: look at its log "
                "and its machine."
            )

    def _reach_verdict(self, waited: float) -> TrainingError | None:
        """Raise an alarm, wait for the answers of the ranks, and return the error that all end with.

        `waited` are the seconds since the last finished step.
        """
        for word in (f"here {self._rank}", f"failed {self._rank}", "alarm"):
            self._store.set(word, "")
        timeout_seconds = self._timeout.total_seconds()
        silent = self._wait_for_ranks("here", until=time.monotonic() + 3 + 2 * self._seconds)
        stalled: list[int] = []
        if waited >= timeout_seconds:
            stalled = self._wait_for_ranks("failed", until=time.monotonic())
        if silent:
            self._write_verdict(silent, f"no longer answer after step {self.step}")
        elif stalled:
            self._write_verdict(
                stalled, f"did not end step {self.step + 1} within {timeout_seconds:g} s"
            )
        elif not self._store.check(["verdict"]):
            return None
        return TrainingError(self._store.get("verdict").decode())

    def _ask_store(self, ask: Callable[[], T]) -> T:
        """Return the answer of the store, and remember a store that does not answer."""
        try:
            return run_with_timeout(ask, STORE_SECONDS + 2 * self._seconds)
        except DistError:
            self._answers = False
            raise

    def _write_verdict(self, ranks: list[int], fact: str) -> None:
        """Write the sentence that all ranks end with, unless another rank wrote one."""
        named = ", ".join(
            f"rank {rank} ({self._get_host(rank)})" for rank in ranks[:MAX_NAMED_RANKS]
        )
        if len(ranks) > MAX_NAMED_RANKS:
            named += f" and {len(ranks) - MAX_NAMED_RANKS} more"
        sentence = (
            f"ranks: all {self._ranks} must take part in every step; {fact}: {named}. "
            "Look at the log and the machine of each."
        )
        self._store.compare_set("verdict", "", sentence)

    def _wait_for_ranks(self, word: str, *, until: float) -> list[int]:
        """Return the ranks that have not written a word and have not left.

        The call returns when there is no such rank, and at the time `until`.
        """
        missing = list(range(self._ranks))
        while missing:
            missing = [rank for rank in missing if not self._has_written(rank, word)]
            if time.monotonic() >= until:
                break
            time.sleep(0.1)
        return missing

    def _has_written(self, rank: int, word: str) -> bool:
        """Return whether a rank has written a word, or left."""
        return self._store.check([f"{word} {rank}"]) or self._store.check([f"left {rank}"])

    def _get_host(self, rank: int) -> str:
        """Return the name of a rank's host, as far as the rank has stored it."""
        if self._store.check([f"host {rank}"]):
            return self._store.get(f"host {rank}").decode()
        return "an unknown host"

    def _answer_alarm(self, store: Store) -> None:
        """Answer an alarm; the target of a thread, which has a separate connection."""
        with suppress(DistError):
            while not self._ended.wait(self._seconds):
                if store.check(["alarm"]):
                    store.set(f"here {self._rank}", "")
                    return
