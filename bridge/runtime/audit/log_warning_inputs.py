"""`make_log_warning_inputs`: the inputs of early warnings, from the log of another trainer."""

from collections.abc import Collection

from bridge.runtime.audit.early_warnings import WarningInputs
from bridge.runtime.audit.run_log import RunLog


def make_log_warning_inputs(log: RunLog, *, silenced: Collection[str] = ()) -> WarningInputs:
    """Return the values of a log from which early warnings are computed.

    The floor of a dynamic loss scale is read from the arguments in the log. A log has no operands
    and weights, so the warnings about them are never given.

    Args:
        silenced: Names of the warnings that are not given.
    """
    train = log.list_records()
    smallest_scale = None
    is_dynamic = log.arguments.get("fp16") is True and not log.arguments.get("loss_scale")
    if is_dynamic and train[-1]["loss_scale"] is not None:
        floor = log.arguments.get("min_loss_scale")
        if isinstance(floor, int | float):
            smallest_scale = float(floor)
    return WarningInputs(train=train, smallest_scale=smallest_scale, silenced=silenced)
