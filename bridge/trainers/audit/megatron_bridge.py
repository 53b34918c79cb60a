"""`AuditCallback`: the audit for the callbacks of Megatron Bridge's training loop.

    pretrain(config, forward_step, callbacks=[AuditCallback()])

Megatron Bridge is not imported. Its manager of callbacks registers each method that has the name of
an event (Megatron Bridge 0.6.2, training/callbacks.py, CallbackManager.add).
"""

from __future__ import annotations

from typing import Any

from bridge.trainers.audit.step_audits import AuditOptions, StepAudits


class AuditCallback:
    """Audits the first two steps of a training loop, and further steps at an interval."""

    def __init__(self, **options: Any) -> None:
        """Take the options of `AuditOptions` by name."""
        self._options = AuditOptions(**options)
        self.audits: StepAudits | None = None
        """The audits of the run. None: the run has not started."""

    def on_train_start(self, context: Any) -> None:
        """Compare the settings of all ranks."""
        self.audits = StepAudits(context.model, context.optimizer, self._options)
        self.audits.compare_ranks()

    def on_train_step_start(self, context: Any) -> None:  # noqa: ARG002  the manager passes it
        """Put the hooks in place if the step is audited."""
        if self.audits is not None:
            self.audits.begin()

    def on_train_step_end(self, context: Any) -> None:  # noqa: ARG002
        """Compare an audited step with the plan."""
        if self.audits is not None:
            self.audits.end()

    def on_train_end(self, context: Any) -> None:  # noqa: ARG002
        """Remove the hooks of a step that did not end."""
        if self.audits is not None:
            self.audits.close()
