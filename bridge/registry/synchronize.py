"""`synchronize`: the precision of a name or config, written into the configs that own it."""

import logging

from bridge.precision.owners import DdpOwner, ModelOwner, OptimizerOwner
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.peer import PeerConfig
from bridge.registry.registry import get_mixed_precision_config
from bridge.sync.report import SyncReport
from bridge.sync.synchroniser import write_precision

log = logging.getLogger(__name__)


def synchronize(
    precision: str | MixedPrecisionConfig | PeerConfig,
    *,
    model: ModelOwner | None = None,
    optimizer: OptimizerOwner | None = None,
    ddp: DdpOwner | None = None,
    train: object = None,
    on_conflict: str = "override",
    strict: bool = False,
) -> SyncReport:
    """Write a precision into the configs that own it: all of them, or after an error none.

    Args:
        precision: A recipe's name or a config, of our class or of Megatron Bridge's.
        model: A TransformerConfig, a subclass of it, or any object with same-named attributes.
        optimizer: An OptimizerConfig, likewise.
        ddp: A DistributedDataParallelConfig, likewise.
        train: A TrainConfig, for the loss check that FP16's dynamic scale would trip.
        on_conflict: What happens where an owner's own value (away from Megatron's default) meets another stated one:
            "override" writes and reports it, "error" raises, "keep" leaves the owner's. The mode switches and the
            scheme are the recipe's in any case.
        strict: The run begins after this sync: raise also on what Megatron is known to refuse later, and bring
            optimizer and DDP in step as Megatron Bridge's runtime does (`bridge.sync.sync_plan`).

    Returns:
        Every precision field of every owner, with old and new value, verdict, who decided, and why. A warning is
        logged for each value of an owner's own that was replaced.

    Raises:
        PrecisionTypeError: No owner at all, or one that is no config object or plays another role.
        PrecisionConfigError: The config can never be right.
        SyncConflictError: A conflict under `on_conflict="error"`.
        SyncCheckError: The result would not pass Megatron's validation or the owners would disagree.
        UnknownPolicyError: An unknown `on_conflict`.
    """
    config = get_mixed_precision_config(precision)
    config.finalize()
    owners = {"model": model, "optimizer": optimizer, "ddp": ddp, "train": train}
    report = write_precision(config, owners, on_conflict=on_conflict, is_last=strict)
    report.log_overrides(log)
    return report
