"""The subjects of a precision's fields, in the order of `show`, `explain` and the reference."""

from dataclasses import dataclass

REDERIVED = "re-derived"
NEEDS_PERMISSION = "needs resume.allow_precision_change=true"
IMPOSSIBLE = "impossible"
OUTCOMES = (REDERIVED, NEEDS_PERMISSION, IMPOSSIBLE)
"""Outcomes of a resume in another precision than the checkpoint's, the mildest first."""
_COMPUTE = (
    "it takes effect in the next step; "
    "the checkpoint's weights and optimizer state stay as they are"
)
_UNSTORED = "nothing of it is in a checkpoint"
_ROUNDED = (
    "the optimizer's state is rounded to the new dtype when it is read; "
    "digits that are gone do not come back"
)
_SCALE = (
    "a dynamic loss scale goes on at the checkpoint's value, "
    "and a new one begins at initial_loss_scale"
)


@dataclass(frozen=True, slots=True)
class Subject:
    """A subject, with the outcome of a change of its fields on resume."""

    title: str
    meaning: str = _COMPUTE
    """The meaning of another value than the checkpoint's in the run that resumes it."""
    outcome: str = REDERIVED
    """One of `OUTCOMES`."""


SUBJECTS = (
    MODE := Subject("Mode"),
    COMPUTE := Subject("Compute"),
    WEIGHTS := Subject("Parameters and gradients", _UNSTORED),
    OPTIMIZER := Subject("Optimizer state", _ROUNDED, NEEDS_PERMISSION),
    WIRE := Subject("Communication", _UNSTORED),
    FSDP := Subject("Megatron-FSDP", _ROUNDED, NEEDS_PERMISSION),
    ATTENTION := Subject("Attention"),
    MOE := Subject("Mixture of experts"),
    FP8 := Subject("FP8"),
    FP4 := Subject("FP4"),
    LAYERS := Subject("Layers in BF16"),
    MODULES := Subject("Single modules"),
    SCALER := Subject("Loss scale", _SCALE),
)
