"""The audit inside other trainers: what their steps ran in, compared with the plan of their configs.

    step_audits.py       `StepAudits`: which steps are audited, and the verdict on each
    attached_audit.py    `attach_audit(model, optimizer)`: for a loop that nothing can be added to
    megatron_bridge.py   `AuditCallback`: for the callbacks of Megatron Bridge
    megatron_lm.py       `audited_training()`: around the `pretrain` of Megatron-LM
    slime.py             `before_train_step`: for the option of slime that names such a function

The first two steps are audited, and the settings of all ranks are compared once. Everything that
an audit adds to a model, an optimizer or a module is removed when the last step was audited.
"""

from bridge.trainers.audit.attached_audit import AttachedAudit, attach_audit
from bridge.trainers.audit.megatron_bridge import AuditCallback
from bridge.trainers.audit.megatron_lm import audited_training
from bridge.trainers.audit.step_audits import AuditOptions, StepAudits

__all__ = [
    "AttachedAudit",
    "AuditCallback",
    "AuditOptions",
    "StepAudits",
    "attach_audit",
    "audited_training",
]
