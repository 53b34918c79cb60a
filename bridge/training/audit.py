"""The audit of a run: its first two steps, the last, the first of a phase, and some between."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bridge.errors import AuditError, TrainingError
from bridge.plan.precision_plan import PrecisionPlan, precision_plan
from bridge.registry.registry import get_mixed_precision_config
from bridge.registry.schedule import Phase
from bridge.runtime.audit.plan_comparison import format_gemms, lacks_low_precision
from bridge.runtime.audit.record import RECORD_FILE, Record
from bridge.runtime.megatron.record.census import take_census
from bridge.runtime.megatron.record.step_recording import StepRecording
from bridge.target.versions import get_installed_version
from bridge.training.run import TrainingRun

log = logging.getLogger("bridge.training")


class Audit:
    """Compares the record of single steps with the plan of the run."""

    def __init__(self, run: TrainingRun, run_dir: Path) -> None:
        self._run = run
        self._path = run_dir / RECORD_FILE
        self._phase: Phase | None = None
        self.record = Record(gemms=())
        """The last record."""
        self.failure: AuditError | None = None
        """The mismatch of a step after the first; the run saves a checkpoint and ends with it."""

    def _is_due(self) -> bool:
        """Return whether the next step, which is not the first, is audited."""
        run, settings = self._run, self._run.config.train
        step = run.iteration + 1
        if settings.audit == "off":
            return False
        # The second step is the first in which a weight can be older than its master.
        is_second = len(run.step_seconds) == 1
        interval = settings.audit_interval
        return is_second or step == settings.train_iters or bool(interval and step % interval == 0)

    @contextmanager
    def record_step(self, phase: Phase | None) -> Iterator[None]:
        """Record the step of a ``with`` block and compare it with the plan, if it is audited.

        Args:
            phase: The phase that the step begins, or None.

        Raises:
            AuditError: The first step of the run or of a phase differs from the plan, under
                ``train.audit=error``.
        """
        is_first = not self._run.step_seconds or phase is not None
        self._phase = phase or self._phase
        if not is_first and not self._is_due():
            yield
            return
        run = self._run
        model, optimizer = run.trainer.model, run.trainer.optimizer
        recording = StepRecording(model, optimizer)
        with recording.record_gemms():
            yield
        census = take_census(model, optimizer, run.activations)
        of_all_ranks = recording.gathered(census)
        step = run.iteration + 1
        self.record = replace(of_all_ranks, census=census, backend=run.backend, step=step)
        if run.config.train.audit != "off":
            self._compare(recording, of_all_ranks, must_raise=is_first)

    def plan(self) -> PrecisionPlan:
        """Return the plan of the precision that the run is in."""
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

    def _compare(self, recording: StepRecording, of_all_ranks: Record, *, must_raise: bool) -> None:
        """Write the record with its mismatches, and raise, keep or log the error about them."""
        plan = self.plan()
        # The error of a healthy layer has a bound in the first two steps alone. The second step is
        # the first with scales of the recipe under delayed scaling.
        is_bounded = must_raise or len(self._run.step_seconds) <= 1
        findings = recording.mismatches(plan, of_all_ranks, is_error_bounded=is_bounded)
        fault = None
        if must_raise:
            fault = _find_lost_low_precision(plan, self.record)
        if self._run.process.is_first:
            sentences = list(map(str, findings))
            if fault:
                sentences.append(fault)
            replace(self.record, audit=tuple(sentences)).write(self._path)
        if fault:
            raise TrainingError(fault)
        if not findings:
            return
        rule = "must run what is planned (train.audit=warn goes on)"
        error = AuditError(f"step {self.record.step} {rule}", findings)
        if self._run.config.train.audit == "warn":
            if self._run.process.is_first:
                log.warning(str(error))
        elif must_raise:
            raise error
        else:
            self.failure = error


def _find_lost_low_precision(plan: PrecisionPlan, record: Record) -> str | None:
    """Return why a run in FP8 or FP4 ends whose plan has no low-precision GEMM, or None.

    Such a plan is equal to its record, and so shows no mismatch. The result is None where the
    recipe has no low precision, or a GEMM ran in it.
    """
    if not lacks_low_precision(plan, record):
        return None
    return (
        f"precision_backend: the first step of {plan.label} ran no matmul in low precision, got "
        f"{format_gemms(record.gemms)}. Check which layers stay in BF16."
    )
