"""`StepAudits`: the audits of single steps of another trainer's loop.

Without an expected precision, the plan is made from the live configs of the model, the optimizer
and Megatron's DDP. A loop calls `begin` before a step and `end` after it, on every rank.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from bridge.errors import AuditError, BridgeError, PrecisionTypeError, RunConfigError
from bridge.plan.precision_plan import PrecisionPlan, precision_plan
from bridge.registry.registry import get_mixed_precision_config
from bridge.runtime.audit.gemm_formats import format_gemms
from bridge.runtime.audit.mismatch import Mismatch
from bridge.runtime.audit.plan_comparison import lacks_low_precision
from bridge.runtime.audit.record import RECORD_FILE, CensusRow, Record
from bridge.runtime.megatron.process.agreement import require_agreement
from bridge.runtime.megatron.record.census import Activations, take_census, watch_activations
from bridge.runtime.megatron.record.step_recording import StepRecording
from bridge.runtime.pytorch.record.operand_format import is_te_module
from bridge.target.versions import get_installed_version
from bridge.training.fingerprint import compute_sections_fingerprint

if TYPE_CHECKING:
    from bridge.registry.mixed_precision_config import MixedPrecisionConfig

log = logging.getLogger("bridge.trainers")

FIRST_STEPS = 2
"""Number of first steps that every run audits.

A quantised weight can be out of date, compared with its master, only from the second step on.
"""
UNJUDGED_COLUMNS = frozenset({"absent", "unplanned"})
"""Columns of mismatches that can have another cause than a wrong precision.

An absent GEMM may run in a CUDA graph or a fused kernel, which the hooks do not see. An unplanned
GEMM may belong to an adapter or a value head, which the configs do not describe.
"""
STAGE_SETTINGS = frozenset({"ddp.bucket_size"})
"""Settings that differ between pipeline stages: Megatron-LM computes them from a stage's
parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditOptions:
    """The expected precision, the audited steps and the reaction to a mismatch."""

    precision: PrecisionPlan | MixedPrecisionConfig | str | None = None
    """The precision that the run should have: a plan, a recipe, or the name of a recipe.

    None: the plan is made from the live configs. Such a plan cannot show that a setting was lost on
    the way into the configs. A recipe can.
    """
    on_mismatch: Literal["error", "warn"] = "error"
    """The reaction to a mismatch: "error" raises an `AuditError` on every rank, and "warn" lets the
    first rank log it."""
    interval: int = 0
    """Steps between two further audits. 0: only the first two steps are audited."""
    folder: Path | str | None = None
    """Folder that the first rank writes ``record.json`` into. None: no file is written."""

    def __post_init__(self) -> None:
        if self.on_mismatch not in ("error", "warn"):
            rule = f"must be error or warn, got {self.on_mismatch!r}"
            raise PrecisionTypeError(f"on_mismatch: {rule}. Name one of them.")
        # Typed as Any, since callers without a type checker can pass other types.
        interval: Any = self.interval
        is_whole = isinstance(interval, int) and not isinstance(interval, bool)
        if not is_whole or interval < 0:
            rule = "must be a whole number from 0 on"
            remedy = "Write 0 to audit the first two steps alone."
            raise PrecisionTypeError.of("interval", rule, interval, remedy)
        folder: Any = self.folder
        if folder is not None and not isinstance(folder, str | os.PathLike):
            remedy = "Name a folder, or leave it out to write no record."
            raise PrecisionTypeError.of("folder", "must be a path", folder, remedy)
        if self.precision is not None and not isinstance(self.precision, PrecisionPlan):
            # Called only for its exception about an unknown recipe.
            get_mixed_precision_config(self.precision)

    def is_due(self, step: int) -> bool:
        """Return whether a step is audited. Steps are counted from 1."""
        if step <= FIRST_STEPS:
            return True
        return self.interval > 0 and step % self.interval == 0

    def is_over(self, step: int) -> bool:
        """Return whether no step after this one is audited."""
        return self.interval <= 0 and step >= FIRST_STEPS


class StepAudits:
    """The audits of the steps of one model and its optimizer."""

    def __init__(self, model: Any, optimizer: Any, options: AuditOptions) -> None:
        """Prepare the audits. No hook is put in place yet.

        Args:
            model: A Megatron model, or this rank's list of its chunks. It may be in Megatron's
                wrappers.
            optimizer: Megatron's optimizer of the model.
            options: The expected precision, the audited steps and the reaction to a mismatch.
        """
        self.options = options
        self.record = Record(gemms=())
        """The record of the last audited step, with the GEMMs of all ranks."""
        self.mismatches: tuple[Mismatch, ...] = ()
        """The differences between the last audited step and the plan."""
        self.steps = 0
        """Number of steps that ended."""
        self.chunks: list[Any] = [model]
        if isinstance(model, list | tuple):
            self.chunks = list(model)
        self._optimizer = optimizer
        self._hooks = ExitStack()
        self._recording: StepRecording | None = None
        self._activations = Activations()

    @property
    def is_recording(self) -> bool:
        """Whether the hooks of an audited step are in place."""
        return self._recording is not None

    @property
    def is_over(self) -> bool:
        """Whether no further step is audited."""
        return self.options.is_over(self.steps)

    def compare_ranks(self) -> None:
        """Compare the configs, packages and environment of all ranks. All ranks must call it.

        Raises:
            RunConfigError: Two ranks differ, and `on_mismatch` is "error".
        """
        if not torch.distributed.is_initialized():
            return
        settings = compute_sections_fingerprint(self._collect_configs(), os.environ)
        for path in STAGE_SETTINGS:
            settings.pop(path, None)
        try:
            require_agreement(settings)
        except RunConfigError as error:
            if self.options.on_mismatch == "error":
                raise
            self._warn(str(error))

    def begin(self) -> None:
        """Begin a step: put the hooks in place if the step is audited."""
        self.close()
        if not self.options.is_due(self.steps + 1):
            return
        self._recording = StepRecording(self.chunks, self._optimizer)
        self._hooks.enter_context(self._recording.record_gemms())
        if self._has_megatron_ddp():
            self._activations = self._hooks.enter_context(watch_activations(self.chunks))

    def end(self) -> None:
        """End a step. An audited step is compared with the plan, and all ranks must call this.

        Raises:
            AuditError: The step did not run what is planned, and `on_mismatch` is "error".
        """
        self.steps += 1
        recording = self._recording
        if recording is None:
            return
        self.close()
        census: tuple[CensusRow, ...] = ()
        if self._has_megatron_ddp():
            census = take_census(self.chunks, self._optimizer, self._activations)
        global_record = recording.gather_record(census)
        # The record has the tensors of this rank. The tensors of other ranks are only compared.
        self.record = replace(
            global_record, census=census, backend=self._detect_backend(), step=self.steps
        )
        plan = self._make_plan()
        if plan is None:
            self._write_record(())
            return
        self.mismatches = recording.find_mismatches(plan, global_record)
        self._judge(plan)

    def close(self) -> None:
        """Remove the hooks of a step."""
        self._hooks.close()
        self._recording = None

    def _judge(self, plan: PrecisionPlan) -> None:
        """Write the record of the last audited step, and raise or log its mismatches.

        Raises:
            AuditError: The step did not run what is planned, and `on_mismatch` is "error".
        """
        wrong, unjudged = [], []
        for mismatch in self.mismatches:
            if mismatch.column in UNJUDGED_COLUMNS:
                unjudged.append(mismatch)
            else:
                wrong.append(mismatch)
        self._write_record(tuple(wrong))
        for mismatch in unjudged:
            self._warn(f"audit: step {self.steps} cannot be judged: {mismatch}")
        if wrong:
            counts = self._format_counts(plan)
            rule = f"must run what is planned (on_mismatch='warn' goes on). {counts}"
        elif lacks_low_precision(plan, self.record):
            rule = f"must multiply in FP8 or FP4 in a layer, as {plan.label} asks"
        else:
            self._log_formats(plan)
            return
        error = AuditError(f"step {self.steps} {rule}", wrong)
        if self.options.on_mismatch == "error":
            raise error
        self._warn(str(error))

    def _format_counts(self, plan: PrecisionPlan) -> str:
        """Return how many of the planned linear layers ran in low precision."""
        planned = plan.linears()[0]
        low = {(row.layer, row.module) for row in self.record.gemms if row.scheme != "none"}
        ran_count = 0
        for layer in plan.layers:
            for module in layer.modules:
                if module.scheme is not None and (layer.label, module.name) in low:
                    ran_count += 1
        if not planned:
            return f"{len(low)} linear layers ran in FP8 or FP4, and none is planned ({plan.label})"
        return (
            f"{ran_count} of {planned} linear layers planned in FP8 or FP4 ran in it ({plan.label})"
        )

    def _log_formats(self, plan: PrecisionPlan) -> None:
        """Log the formats of the step's GEMMs, on the first rank."""
        if _is_first_rank():
            gemms = format_gemms(self.record.gemms) or "no matrix multiplication was seen"
            log.info("audit: step %d, %s: %s.", self.steps, plan.label, gemms)

    def _write_record(self, wrong: tuple[Mismatch, ...]) -> None:
        """Write the record of the step with its mismatches into the folder, on the first rank."""
        if self.options.folder is None or not _is_first_rank():
            return
        folder = Path(self.options.folder)
        folder.mkdir(parents=True, exist_ok=True)
        sentences = tuple(map(str, wrong))
        replace(self.record, audit=sentences).write(folder / RECORD_FILE)

    def _make_plan(self) -> PrecisionPlan | None:
        """Return the plan. None if the model cannot be planned, which is logged as a warning."""
        precision = self.options.precision
        if isinstance(precision, PrecisionPlan):
            return precision
        if precision is not None:
            precision = get_mixed_precision_config(precision)
        configs = self._collect_configs()
        try:
            return precision_plan(
                precision,
                configs["model"],
                optimizer=configs["optimizer"],
                ddp=configs["ddp"],
                mcore=get_installed_version("mcore"),
                environment=os.environ,
            )
        except BridgeError as error:
            self._warn(f"audit: step {self.steps} is recorded and cannot be judged: {error}")
            return None

    def _collect_configs(self) -> dict[str, Any]:
        """Return section -> live config, or None if the trainer has no such config."""
        first = self.chunks[0]
        return {
            "model": getattr(first, "config", None),
            "optimizer": getattr(self._optimizer, "config", None),
            "ddp": getattr(first, "ddp_config", None),
        }

    def _has_megatron_ddp(self) -> bool:
        """Return whether every chunk is in Megatron's DDP.

        The buffers of DDP have the gradients. Without them, a census of tensors is not possible.
        """
        return all(hasattr(chunk, "bucket_groups") for chunk in self.chunks)

    def _detect_backend(self) -> str:
        """Return the backend of the model's layers: te or local."""
        for chunk in self.chunks:
            if any(is_te_module(module) for module in chunk.modules()):
                return "te"
        return "local"

    def _warn(self, sentence: str) -> None:
        """Log a warning on the first rank."""
        if _is_first_rank():
            log.warning(sentence)


def _is_first_rank() -> bool:
    """Return whether this process is the first rank, or the only process."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
