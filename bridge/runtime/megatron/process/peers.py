"""`Peers`: finds the rank that ended or stalled, without collectives, after a collective failed.

A rank that dies closes its connections, and a rank that stalls lets the collectives of other ranks
time out. On the other ranks both are an error of a collective, which names no rank. So:

1. A rank with such an error writes an alarm into the store of the launch.
2. A thread of each rank reads the alarm, and writes an answer.
3. A rank without an answer is dead or stopped. A rank that answered, and has no error within the
   timeout, is stalled.
4. The first rank that knows this writes the sentence with which all ranks end, the verdict.

Each rank reads the store once a second, and less often in a launch of more than 5000 ranks, so that
the store gets at most 5000 requests a second.
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
"""The time for which a rank that ends waits for the store."""
POLLS_PER_SECOND = 5000
"""The largest number of requests a second to the store, of all ranks together."""
MAX_NAMED_RANKS = 8
"""The largest number of ranks that a sentence names. The others are counted."""


def run_with_timeout(request: Callable[[], T], seconds: float) -> T:
    """Return the result of a request to a store, which could wait forever without a timeout.

    Raises:
        DistError: The store does not answer in time.
    """
    result: Future[T] = Future()

    def run_request() -> None:
        try:
            result.set_result(request())
        except Exception as error:  # noqa: BLE001  raised in the caller's thread
            result.set_exception(error)

    # An executor would wait for the thread at the end of the process.
    threading.Thread(target=run_request, daemon=True).start()
    try:
        return result.result(timeout=seconds)
    except TimeoutError:
        raise DistError("the store does not answer") from None


class Peers:
    """The other ranks of a launch, as this rank sees them in the store."""

    def __init__(self, store: Store, rank: int, ranks: int, timeout: timedelta) -> None:
        """Prepare the search. `answer_alarms` starts the thread.

        Args:
            store: Store of the launch, with keys of this run only.
            ranks: Number of ranks.
            timeout: The time for which a collective waits for its ranks.
        """
        self.step = 0
        """The last step that this rank finished."""
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._timeout = timeout
        self._poll_seconds = max(1.0, ranks / POLLS_PER_SECOND)
        self._step_ended_at = time.monotonic()
        self._store_answers = True
        """Whether the store has answered every request so far."""
        self._ended = threading.Event()
        """Ends the thread."""

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
                if self._store_answers:
                    self._request(lambda: self._store.set(f"left {self._rank}", ""))
            if self._store_answers:
                thread.join()

    def record_step_end(self, step: int) -> None:
        """Record the end of a step."""
        self.step = step
        self._step_ended_at = time.monotonic()

    def report_end(self, clause: str) -> None:
        """Write that this rank ends, for the ranks whose collectives fail because of it.

        Args:
            clause: The end of the sentence, for example "was stopped."
        """
        with suppress(DistError):
            sentence = f"ranks: rank {self._rank} ({socket.gethostname()}) {clause}"
            self._store.compare_set("verdict", "", sentence)

    def diagnose_failure(self) -> TrainingError | None:
        """Return the error that names the ranks that made a collective fail.

        The result is None if no other rank is at fault.
        """
        waited_seconds = time.monotonic() - self._step_ended_at
        try:
            return self._request(lambda: self._reach_verdict(waited_seconds))
        except DistError:
            return TrainingError(
                "ranks: the store of the launch must answer every rank, and no longer does. "
                "The first rank, or the agent of the launch, has ended or stalls: look at its log "
                "and its machine."
            )

    def _reach_verdict(self, waited_seconds: float) -> TrainingError | None:
        """Write an alarm, wait for the answers of the ranks, and return the error of all ranks.

        Args:
            waited_seconds: Seconds since the last finished step. A stalled rank is looked for only
                if they exceed the timeout of a collective.
        """
        for key in (f"here {self._rank}", f"failed {self._rank}", "alarm"):
            self._store.set(key, "")
        timeout_seconds = self._timeout.total_seconds()
        silent = self._wait_for_ranks("here", until=time.monotonic() + 3 + 2 * self._poll_seconds)
        stalled: list[int] = []
        if waited_seconds >= timeout_seconds:
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

    def _request(self, request: Callable[[], T]) -> T:
        """Return the result of a request to the store, and remember if the store does not answer.

        Raises:
            DistError: The store does not answer in time.
        """
        try:
            return run_with_timeout(request, STORE_SECONDS + 2 * self._poll_seconds)
        except DistError:
            self._store_answers = False
            raise

    def _write_verdict(self, ranks: list[int], fact: str) -> None:
        """Write the sentence with which all ranks end, unless another rank wrote it."""
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
        """Return the ranks that have not written a key and have not left.

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
        """Return whether a rank has written a key, or left."""
        return self._store.check([f"{word} {rank}"]) or self._store.check([f"left {rank}"])

    def _get_host(self, rank: int) -> str:
        """Return the name of a rank's host, as far as the rank has stored it."""
        if self._store.check([f"host {rank}"]):
            return self._store.get(f"host {rank}").decode()
        return "an unknown host"

    def _answer_alarm(self, store: Store) -> None:
        """Answer an alarm. It is the target of a thread, which has a separate connection."""
        with suppress(DistError):
            while not self._ended.wait(self._poll_seconds):
                if store.check(["alarm"]):
                    store.set(f"here {self._rank}", "")
                    return
