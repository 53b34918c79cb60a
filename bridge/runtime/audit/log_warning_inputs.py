"""The early warnings' view of a log: the same signs of trouble, as far as the log shows them."""

from collections.abc import Collection

from bridge.runtime.audit.early_warnings import WarningInputs
from bridge.runtime.audit.run_log import RunLog


def make_log_warning_inputs(log: RunLog, *, silenced: Collection[str] = ()) -> WarningInputs:
    """Return what a log holds for the early warnings.

    The floor of a dynamic loss scale is an argument. Operands and weights are in no log.
    """
    train = log.records()
    smallest_scale = None
    is_dynamic = log.arguments.get("fp16") is True and not log.arguments.get("loss_scale")
    if is_dynamic and train[-1]["loss_scale"] is not None:
        floor = log.arguments.get("min_loss_scale")
        if isinstance(floor, int | float):
            smallest_scale = float(floor)
    return WarningInputs(train=train, smallest_scale=smallest_scale, silenced=silenced)
