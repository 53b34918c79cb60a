"""`StepRecording`: one step of a Megatron model, recorded and compared with a plan.

    recording = StepRecording(model, optimizer)
    with recording.record_gemms():
        ...                                          # forward, backward and optimizer of one step
    record = recording.gather_record(census)         # of all ranks
    recording.find_mismatches(plan, record)

Both the loop of this project and the audits inside other trainers' loops use it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bridge.plan.precision_plan import PrecisionPlan
from bridge.runtime.audit.mismatch import Mismatch
from bridge.runtime.audit.plan_comparison import compare_with_plan
from bridge.runtime.audit.record import CensusRow, Record
from bridge.runtime.megatron.record.weight_copies import WeightCopy, find_wrong_copies, watch_copies
from bridge.runtime.pytorch.live_audit import gather_record
from bridge.runtime.pytorch.record.gemm_watch import GemmWatch


class StepRecording:
    """The GEMMs of one step, and the copies of the weights that it read."""

    def __init__(self, model: list[Any], optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        self._watch = GemmWatch(model)
        self._copies: list[WeightCopy] = []

    @contextmanager
    def record_gemms(self) -> Iterator[None]:
        """Record the step of a ``with`` block."""
        with self._watch.record_gemms(), watch_copies(self._model, self._optimizer) as copies:
            yield
        self._copies = copies

    def gather_record(self, census: tuple[CensusRow, ...]) -> Record:
        """Return the record of all ranks in a collective call.

        Args:
            census: The tensors of this rank.
        """
        return gather_record(self._watch, census)

    def find_mismatches(
        self, plan: PrecisionPlan, record: Record, *, is_error_bounded: bool = True
    ) -> tuple[Mismatch, ...]:
        """Return the differences of the record of all ranks from the plan in a collective call.

        Args:
            plan: The plan of the step.
            record: The record that `gather_record` returned.
            is_error_bounded: Whether the error of a healthy layer has a limit in this step.
        """
        of_copies = find_wrong_copies(self._copies)
        mismatches = []
        for mismatch in compare_with_plan(plan, record):
            # A weight that was gathered wrongly also looks stale. It is reported once.
            is_explained = mismatch.column == "stale" and bool(of_copies)
            is_unbounded = mismatch.column == "error" and not is_error_bounded
            if not is_explained and not is_unbounded:
                mismatches.append(mismatch)
        return (*mismatches, *of_copies)
