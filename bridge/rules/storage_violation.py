"""`make_storage_violation`: a violation of the setting that stores weights in FP8 or FP4."""

from bridge.precision.statements import is_stated
from bridge.rules.context import RuleContext
from bridge.rules.violation import Violation


def make_storage_violation(
    context: RuleContext, family: str, *, severity: str | None = None
) -> Violation:
    """Return a violation of the setting that stores weights in a family, fp8 or fp4.

    The setting is the recipe's field if the recipe states it. Otherwise it is the attribute of DDP
    or of the model.
    """
    gather = f"{family}_param_gather"
    if context.precision is None or is_stated(context.precision, gather):
        return Violation(gather, value=True, severity=severity)
    path = f"model.{family}_param"
    if getattr(context.ddp, gather):
        path = f"ddp.{gather}"
    where = context.get_source(path) or path.partition(".")[0]
    return Violation(path, value=True, where=where, severity=severity)
