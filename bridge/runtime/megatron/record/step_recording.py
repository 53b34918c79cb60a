"""`StepRecording`: what one step of a Megatron model ran in, compared with a plan.

    recording = StepRecording(model, optimizer)
    with recording.watching():
        ...                                          # forward, backward and optimizer of one step
    record = recording.gathered(census)              # of all ranks
    recording.mismatches(plan, record)

The loop of this project and the audits inside other trainers' loops use it alike.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bridge.plan.precision_plan import PrecisionPlan
from bridge.runtime.audit.compare import Mismatch, compare
from bridge.runtime.audit.record import CensusRow, Record
from bridge.runtime.megatron.record.copies import Copy, watch_copies, wrong_copies
from bridge.runtime.pytorch.live_audit import gathered
from bridge.runtime.pytorch.record.watch import GemmWatch


class StepRecording:
    """The GEMMs of one step, and the copies of the weights that it read."""

    def __init__(self, model: list[Any], optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        self._watch = GemmWatch(model)
        self._copies: list[Copy] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the step of a ``with`` block."""
        with self._watch.watching(), watch_copies(self._model, self._optimizer) as copies:
            yield
        self._copies = copies

    def gathered(self, census: tuple[CensusRow, ...]) -> Record:
        """Return the record of all ranks, which each bring a census; a collective call."""
        return gathered(self._watch, census)

    def mismatches(
        self, plan: PrecisionPlan, record: Record, *, is_error_bounded: bool = True
    ) -> tuple[Mismatch, ...]:
        """Return where the record of all ranks differs from the plan; a collective call.

        Args:
            plan: The plan of the step.
            record: The record that `gathered` returned.
            is_error_bounded: Whether the error of a healthy layer has a limit in this step.
        """
        of_copies = wrong_copies(self._copies)
        mismatches = []
        for mismatch in compare(plan, record):
            # A weight that is not its master's explains a stale one: it is no other fault.
            is_explained = mismatch.column == "stale" and bool(of_copies)
            is_unbounded = mismatch.column == "error" and not is_error_bounded
            if not is_explained and not is_unbounded:
                mismatches.append(mismatch)
        return (*mismatches, *of_copies)
