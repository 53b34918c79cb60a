"""`make_storage_violation`: the setting that stores the weights of a run in low precision."""

from bridge.precision.statements import is_stated
from bridge.rules.context import RuleContext
from bridge.rules.violation import Violation


def make_storage_violation(
    context: RuleContext, family: str, *, severity: str | None = None
) -> Violation:
    """Return the violation of the setting that stores weights in a family, fp8 or fp4.

    It is the recipe's, or else that of the config that has it.
    """
    gather = f"{family}_param_gather"
    if context.precision is None or is_stated(context.precision, gather):
        return Violation(gather, value=True, severity=severity)
    path = f"model.{family}_param"
    if getattr(context.ddp, gather):
        path = f"ddp.{gather}"
    where = context.where(path) or path.partition(".")[0]
    return Violation(path, value=True, where=where, severity=severity)
