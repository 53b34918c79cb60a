"""`attach_audit`: the audit of a training loop that cannot be changed.

    from bridge.trainers.audit import attach_audit
    attach_audit(model, optimizer)

A step begins with the first forward pass that records gradients. It ends with the optimizer's step.
So forward passes between two steps are not audited: an evaluation, a rollout, log-probabilities.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.hooks import RemovableHandle

from bridge.trainers.audit.step_audits import AuditOptions, StepAudits

if TYPE_CHECKING:
    from bridge.plan.precision_plan import PrecisionPlan
    from bridge.registry.mixed_precision_config import MixedPrecisionConfig


class AttachedAudit:
    """Hooks on the chunks of a model, and a wrapper of its optimizer's `step`."""

    def __init__(self, audits: StepAudits, optimizer: Any) -> None:
        """Put the hooks and the wrapper in place."""
        self.audits = audits
        self._optimizer = optimizer
        # Another program may have set a wrapper on the object before. It is put back at the end.
        self._instance_step = vars(optimizer).get("step")
        self._step = optimizer.step
        self._hooks: list[RemovableHandle] = []
        for chunk in audits.chunks:
            self._hooks.append(chunk.register_forward_pre_hook(self._begin_step))
        optimizer.step = self._run_step

    def detach(self) -> None:
        """Remove the hooks and the wrapper. A second call changes nothing."""
        self.audits.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        # If another program has put a wrapper over this wrapper, that wrapper stays.
        if vars(self._optimizer).get("step") != self._run_step:
            return
        if self._instance_step is None:
            del self._optimizer.step
        else:
            self._optimizer.step = self._instance_step

    def _begin_step(self, _module: torch.nn.Module, _inputs: Any) -> None:
        """Begin the audit of a step with its first forward pass."""
        if torch.is_grad_enabled() and not self.audits.is_recording:
            self.audits.begin()

    def _run_step(self, *arguments: Any, **named: Any) -> Any:
        """Run the optimizer's step, and end the audit of the training step.

        The audit is detached after the last audited step, and after an error.
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
    """Audit the next steps of a model.

    Every rank must call this function, since it compares the settings of the ranks. The audit is
    detached after the last audited step.

    Args:
        model: A Megatron model, or this rank's list of its chunks.
        optimizer: Megatron's optimizer. Its `step` ends a training step.
        precision: The precision that the run should have, as in `AuditOptions`.
        on_mismatch: "error" or "warn", as in `AuditOptions`.
        interval: Steps between two further audits. 0: only the first two steps are audited.
        folder: Folder for ``record.json``. None: no file is written.

    Returns:
        The attached audit, which can be detached earlier.

    Raises:
        RunConfigError: Two ranks have different settings, and `on_mismatch` is "error".
    """
    options = AuditOptions(
        precision=precision, on_mismatch=on_mismatch, interval=interval, folder=folder
    )
    audits = StepAudits(model, optimizer, options)
    audits.compare_ranks()
    return AttachedAudit(audits, optimizer)
