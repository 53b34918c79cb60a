"""`attach_audit`: the audit of a loop that has no place for a call around its steps.

    from bridge.trainers.audit import attach_audit
    attach_audit(model, optimizer)

A step begins with the first forward pass that keeps gradients, and ends with the optimizer's step.
So forward passes for log-probabilities, an evaluation or a rollout between two steps are left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from bridge.trainers.audit.step_audits import AuditOptions, StepAudits

if TYPE_CHECKING:
    from bridge.plan.precision_plan import PrecisionPlan
    from bridge.registry.config import MixedPrecisionConfig


class AttachedAudit:
    """Hooks on the chunks of a model, and a wrapper of its optimizer's `step`."""

    def __init__(self, audits: StepAudits, optimizer: Any) -> None:
        self.audits = audits
        self._optimizer = optimizer
        self._replaced = vars(optimizer).get("step")
        self._step = optimizer.step
        self._hooks: list[Any] = []
        for chunk in audits.chunks:
            self._hooks.append(chunk.register_forward_pre_hook(self._begin_step))
        optimizer.step = self._run_step

    def detach(self) -> None:
        """Remove the hooks and the wrapper; a second call changes nothing."""
        self.audits.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if vars(self._optimizer).get("step") != self._run_step:
            return
        if self._replaced is None:
            del self._optimizer.step
        else:
            self._optimizer.step = self._replaced

    def _begin_step(self, _module: torch.nn.Module, _inputs: Any) -> None:
        """Begin the audit of a step with its first forward pass."""
        if torch.is_grad_enabled() and not self.audits.is_recording:
            self.audits.begin()

    def _run_step(self, *arguments: Any, **named: Any) -> Any:
        """Run the optimizer's step and end the audit of the training step.

        Everything is detached after the last audited step, and after an error.
        """
        result = self._step(*arguments, **named)
        try:
            self.audits.end()
        except BaseException:
            self.detach()
            raise
        if self.audits.is_over:
            self.detach()
        return result


def attach_audit(
    model: Any,
    optimizer: Any,
    *,
    precision: PrecisionPlan | MixedPrecisionConfig | str | None = None,
    on_mismatch: Literal["error", "warn"] = "error",
    interval: int = 0,
    folder: Path | str | None = None,
) -> AttachedAudit:
    """Audit the coming steps of a model; every rank calls it, since it compares their settings.

    It detaches by itself after the last audited step.

    Args:
        model: A Megatron model, or this rank's list of its chunks.
        optimizer: Megatron's optimizer, whose `step` ends a step.
        precision: See `AuditOptions`, as for the other arguments.
        on_mismatch: "error" or "warn".
        interval: Steps from one further audit to the next; with 0 the first two steps alone are
            audited.
        folder: Folder for ``record.json``.

    Raises:
        RunConfigError: Two ranks have different settings, and `on_mismatch` is "error".
    """
    options = AuditOptions(
        precision=precision, on_mismatch=on_mismatch, interval=interval, folder=folder
    )
    audits = StepAudits(model, optimizer, options)
    audits.compare_ranks()
    return AttachedAudit(audits, optimizer)
