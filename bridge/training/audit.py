"""`Audit`: compares the recorded formats of single steps of a run with the plan of the run.

The first two steps, the first step of each phase and the last step are audited, and further steps
at an interval. A caller can choose other steps.
"""

import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bridge.errors import AuditError, TrainingError
from bridge.plan.precision_plan import PrecisionPlan, precision_plan
from bridge.registry.registry import get_mixed_precision_config
from bridge.registry.schedule import Phase
from bridge.runtime.audit.gemm_formats import format_gemms
from bridge.runtime.audit.plan_comparison import lacks_low_precision
from bridge.runtime.audit.record import RECORD_FILE, Record
from bridge.runtime.megatron.record.census import take_census
from bridge.runtime.megatron.record.step_recording import StepRecording
from bridge.target.versions import get_installed_version
from bridge.training.run import TrainingRun

log = logging.getLogger("bridge.training")


class Audit:
    """Compares the records of single steps with the plan of the run."""

    def __init__(
        self, run: TrainingRun, run_dir: Path, *, steps: Collection[int] | None = None
    ) -> None:
        """Prepare the audit of a run; nothing is recorded yet.

        Args:
            run_dir: The folder of the record.
            steps: The steps to record, from 1 on. None chooses them by ``train.audit``.
        """
        self._run = run
        self._path = run_dir / RECORD_FILE
        self._steps = steps
        self._phase: Phase | None = None
        self.record = Record(gemms=())
        """The record of the last audited step."""
        self.failure: AuditError | None = None
        """The mismatch of a step after the first step. The run saves a checkpoint before it ends
        with this error."""

    def _is_due(self) -> bool:
        """Return whether the next step, which begins neither the run nor a phase, is audited."""
        run, train = self._run, self._run.config.train
        step = run.iteration + 1
        if train.audit == "off":
            return False
        # The second step is the first in which a weight can be older than its master.
        is_second = len(run.step_seconds) == 1
        is_last = step == train.train_iters
        ends_interval = train.audit_interval > 0 and step % train.audit_interval == 0
        return is_second or is_last or ends_interval

    @contextmanager
    def record_step(self, phase: Phase | None) -> Iterator[None]:
        """Record the step of a ``with`` block and compare it with the plan, if it is audited.

        Args:
            phase: The phase that begins with the step. None: no phase begins.

        Raises:
            AuditError: The first step of the run or of a phase differs from the plan, under
                ``train.audit=error``.
        """
        is_first = not self._run.step_seconds or phase is not None
        self._phase = phase or self._phase
        is_recorded = is_first or self._is_due()
        if self._steps is not None:
            is_recorded = self._run.iteration + 1 in self._steps
        if not is_recorded:
            yield
            return
        run = self._run
        model, optimizer = run.trainer.model, run.trainer.optimizer
        recording = StepRecording(model, optimizer)
        with recording.record_gemms():
            yield
        census = take_census(model, optimizer, run.activations)
        global_record = recording.gather_record(census)
        step = run.iteration + 1
        # The record has the tensors of this rank. The tensors of all ranks are only compared.
        self.record = replace(global_record, census=census, backend=run.backend, step=step)
        if run.config.train.audit != "off":
            self._compare(recording, global_record, must_raise=is_first)

    def plan(self) -> PrecisionPlan:
        """Return the plan of the present phase, or of the run if it has no phases."""
        config, model = self._run.config, self._run.trainer.config
        precision = config.mixed_precision
        if self._phase is not None:
            precision = self._phase.precision
        if precision is not None:
            precision = get_mixed_precision_config(precision)
        owners = {"optimizer": config.optimizer, "ddp": config.ddp}
        return precision_plan(
            precision, model, **owners, mcore=get_installed_version("mcore"), environment=os.environ
        )

    def _compare(
        self, recording: StepRecording, global_record: Record, *, must_raise: bool
    ) -> None:
        """Compare a step with the plan, and write the record with the mismatches.

        Args:
            global_record: The record of all ranks.
            must_raise: Whether the step begins the run or a phase, so that a mismatch ends the run
                at once.

        Raises:
            TrainingError: A run in FP8 or FP4 has no low-precision GEMM.
            AuditError: There are mismatches, under ``train.audit=error`` and `must_raise`.
        """
        plan = self.plan()
        # The error of a healthy layer has a bound only in the first two steps. Under delayed
        # scaling, the second step is the first that has scales of the recipe.
        is_bounded = must_raise or len(self._run.step_seconds) <= 1
        mismatches = recording.find_mismatches(plan, global_record, is_error_bounded=is_bounded)
        fault = None
        if must_raise:
            fault = _find_lost_low_precision(plan, self.record)
        if self._run.process.is_first:
            sentences = list(map(str, mismatches))
            if fault:
                sentences.append(fault)
            replace(self.record, audit=tuple(sentences)).write(self._path)
        if fault:
            raise TrainingError(fault)
        if mismatches:
            rule = "must run what is planned (train.audit=warn goes on)"
            error = AuditError(f"step {self.record.step} {rule}", mismatches)
            self._report(error, must_raise=must_raise)

    def _report(self, error: AuditError, *, must_raise: bool) -> None:
        """Log an error under ``train.audit=warn``, else raise it or keep it as the failure."""
        if self._run.config.train.audit == "warn":
            if self._run.process.is_first:
                log.warning(str(error))
        elif must_raise:
            raise error
        else:
            self.failure = error


def _find_lost_low_precision(plan: PrecisionPlan, record: Record) -> str | None:
    """Return the fault of a run whose recipe has FP8 or FP4, but whose layers all stay in BF16.

    The comparison shows no mismatch then, since the plan has no low-precision GEMM either.

    Returns:
        The fault, or None if the recipe has no low precision or a GEMM ran in it.
    """
    if not lacks_low_precision(plan, record):
        return None
    return (
        f"precision_backend: the first step of {plan.label} ran no matmul in low precision, got "
        f"{format_gemms(record.gemms)}. Check which layers stay in BF16."
    )
