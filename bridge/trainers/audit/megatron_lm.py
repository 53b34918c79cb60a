"""`audited_training`: the audit around the `pretrain` of Megatron-LM.

    with audited_training():
        pretrain(...)

Megatron-LM's loop does not support callbacks. For every step, the loop looks up `train_step` in its
module (megatron-core 0.16 to 0.19, megatron/training/training.py, `train`). So `train_step` is
replaced in the module until the block ends.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bridge.trainers.audit.step_audits import AuditOptions, StepAudits


@contextmanager
def audited_training(**options: Any) -> Iterator[None]:
    """Audit the steps of Megatron-LM's loop in a ``with`` block.

    Args:
        **options: The fields of `AuditOptions`.

    Raises:
        ImportError: Megatron-LM's `megatron.training` is not importable.
        AuditError: A step did not run what is planned, and `on_mismatch` is "error".
        RunConfigError: Two ranks have different settings, and `on_mismatch` is "error".
    """
    from megatron.training import training

    audited = _AuditedTrainStep(training.train_step, AuditOptions(**options))
    training.train_step = audited
    try:
        yield
    finally:
        training.train_step = audited.train_step
        audited.close()


class _AuditedTrainStep:
    """A replacement of Megatron-LM's `train_step` that audits the step."""

    def __init__(self, train_step: Callable[..., Any], options: AuditOptions) -> None:
        self.train_step = train_step
        self._options = options
        self._signature = inspect.signature(train_step)
        self._audits: StepAudits | None = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the step, with the hooks of the audit around it."""
        if self._audits is None:
            # The model and the optimizer of the run are arguments of the first step.
            bound = self._signature.bind(*arguments, **named).arguments
            self._audits = StepAudits(bound["model"], bound["optimizer"], self._options)
            self._audits.compare_ranks()
        self._audits.begin()
        result = self.train_step(*arguments, **named)
        self._audits.end()
        return result

    def close(self) -> None:
        """Remove the hooks of a step that did not end."""
        if self._audits is not None:
            self._audits.close()
