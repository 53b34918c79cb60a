"""The early warnings' view of a log: the same signs of trouble, as far as the log shows them."""

from collections.abc import Collection

from bridge.runtime.audit.early_warnings import Signs
from bridge.runtime.audit.run_log import RunLog


def signs_of_log(log: RunLog, *, silenced: Collection[str] = ()) -> Signs:
    """Return what a log holds for the early warnings.

    The floor of a dynamic loss scale is an argument. Operands and weights are in no log.
    """
    smallest_scale = None
    is_dynamic = log.arguments.get("fp16") is True and not log.arguments.get("loss_scale")
    if is_dynamic and log.values("loss_scale"):
        smallest_scale = log.arguments.get("min_loss_scale")
    return Signs(train=log.records(), smallest_scale=smallest_scale, silenced=silenced)
