"""The ranks of a launch, asked outside of collectives: which of them ended or stalled when a collective failed.

A rank that dies closes its connections, and one that stalls lets the collectives of the others time out. Either is an
error of a collective on the others, which names no rank. The rank that has the error raises an alarm in the store of
the launch. A thread of each rank looks there and answers. A rank without an answer is dead or stopped; one that answers
and has not failed within the timeout is stalled. The first rank that knows writes the sentence, and all end with it.

Each rank asks the store once a second, and less often in a launch of more than 5000 ranks, so that the store answers at
most 5000 questions a second.
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
QUESTIONS = 5000
"""Most questions a second to the store, of all ranks together."""
SHOWN = 8
"""Ranks that a sentence names; the others are counted."""


def in_time(ask: Callable[[], T], seconds: float) -> T:
    """Return what a store answers; DistError after some seconds, since one that stalls lets its clients wait."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:  # noqa: BLE001  raised in the caller's thread
            answer.set_exception(error)

    threading.Thread(
        target=work, daemon=True
    ).start()  # an executor would wait for it at the end of the process
    try:
        return answer.result(timeout=seconds)
    except TimeoutError:
        raise DistError("the store does not answer") from None


class Peers:
    """This rank's view of the others."""

    def __init__(self, store: Store, rank: int, ranks: int, timeout: timedelta) -> None:
        self.step = 0
        """The last step that this rank finished."""
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._timeout = timeout
        self._seconds = max(1.0, ranks / QUESTIONS)
        self._marked = time.monotonic()
        self._answers = True
        """Whether the store answered whenever it was asked."""
        self._ended = threading.Event()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answer the alarms of other ranks in a thread, for the length of a ``with`` block."""
        self._store.set(f"host {self._rank}", socket.gethostname())
        own: Any = self._store
        thread = threading.Thread(target=self._answer, args=(own.clone(),), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            with suppress(DistError):
                if self._answers:
                    self._in_time(lambda: self._store.set(f"left {self._rank}", ""))
            thread.join(None if self._answers else 0)

    def finished(self, step: int) -> None:
        """Note the end of a step."""
        self.step = step
        self._marked = time.monotonic()

    def ends(self, how: str) -> None:
        """Let ranks whose collectives fail because this one ends say why."""
        with suppress(DistError):
            self._store.compare_set(
                "verdict", "", f"ranks: rank {self._rank} ({socket.gethostname()}) {how}"
            )

    def blame(self) -> TrainingError | None:
        """Return the error that names the ranks behind a failed collective; None where the fault is this rank's own."""
        waited = time.monotonic() - self._marked
        try:
            return self._in_time(lambda: self._judged(waited))
        except DistError:
            return TrainingError(
                "ranks: the store of the launch must answer every rank, and no longer does. The first rank, or the "
                "agent of the launch, has ended or stalls: look at its log and its machine."
            )

    def _judged(self, waited: float) -> TrainingError | None:
        """Return the error of `blame` as the store has it; `waited` are the seconds since the last finished step."""
        for word in (f"here {self._rank}", f"failed {self._rank}", "alarm"):
            self._store.set(word, "")
        silent = self._without("here", until=time.monotonic() + 3 + 2 * self._seconds)
        stalled = waited >= self._timeout.total_seconds() and self._without(
            "failed", until=time.monotonic()
        )
        if silent:
            self._accuse(silent, f"no longer answer after step {self.step}")
        elif stalled:
            self._accuse(
                stalled,
                f"did not end step {self.step + 1} within {self._timeout.total_seconds():g} s",
            )
        elif not self._store.check(["verdict"]):
            return None
        return TrainingError(self._store.get("verdict").decode())

    def _in_time(self, ask: Callable[[], T]) -> T:
        try:
            return in_time(ask, STORE_SECONDS + 2 * self._seconds)
        except DistError:
            self._answers = False
            raise

    def _accuse(self, ranks: list[int], fact: str) -> None:
        """Write the sentence that all ranks end with, unless another rank wrote one."""
        named = ", ".join(f"rank {rank} ({self._host(rank)})" for rank in ranks[:SHOWN])
        more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
        sentence = f"ranks: all {self._ranks} must take part in every step; {fact}: {named}{more}."
        self._store.compare_set(
            "verdict", "", f"{sentence} Look at the log and the machine of each."
        )

    def _without(self, word: str, *, until: float) -> list[int]:
        """Return the ranks that have not written a word nor left, as soon as there is none, or at a time."""
        missing = list(range(self._ranks))
        while missing:
            keys = ((rank, (f"{word} {rank}", f"left {rank}")) for rank in missing)
            missing = [
                rank
                for rank, (own, left) in keys
                if not (self._store.check([own]) or self._store.check([left]))
            ]
            if time.monotonic() >= until:
                break
            time.sleep(0.1)
        return missing

    def _host(self, rank: int) -> str:
        return (
            self._store.get(f"host {rank}").decode()
            if self._store.check([f"host {rank}"])
            else "an unknown host"
        )

    def _answer(self, store: Store) -> None:
        """Answer an alarm, in a thread with a connection of its own."""
        with suppress(DistError):
            while not self._ended.wait(self._seconds):
                if store.check(["alarm"]):
                    store.set(f"here {self._rank}", "")
                    return
