"""`before_train_step`: the audit of slime's training actors, through an option of its command line.

    --custom-megatron-before-train-step-hook-path bridge.trainers.audit.slime.before_train_step

slime calls the function in its training actors before each step, between the optimizer's
`zero_grad` and the forward pass (slime of 2026-08-21, 624b824a,
slime/backends/megatron_utils/model.py, `train_one_step`).
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from bridge.trainers.audit.attached_audit import attach_audit

_AUDITED: WeakSet[Any] = WeakSet()
"""Optimizers to which an audit was attached in this process."""


def before_train_step(  # noqa: PLR0917  the parameters are slime's
    args: Any,  # noqa: ARG001
    rollout_id: int,  # noqa: ARG001
    step_id: int,  # noqa: ARG001
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,  # noqa: ARG001
) -> None:
    """Attach an audit before the first step of an optimizer.

    A team that needs other options writes such a function, which calls `attach_audit` with them.
    """
    if optimizer not in _AUDITED:
        _AUDITED.add(optimizer)
        attach_audit(model, optimizer)
