"""`synchronize`: the public function that writes a precision into Megatron's configs."""

import logging

from bridge.precision.owners import DdpOwner, ModelOwner, OptimizerOwner
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
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
    """Write a precision into Megatron's configs. After an error the configs are restored.

    Args:
        precision: A recipe's name, or a config of our class or of Megatron Bridge's class.
        model: A TransformerConfig, a subclass of it, or an object with attributes of these names.
        optimizer: An OptimizerConfig, or an object with attributes of these names.
        ddp: A DistributedDataParallelConfig, or an object with attributes of these names.
        train: A TrainConfig. Its NaN check of the loss is turned off under a dynamic loss scale.
        on_conflict: The reaction to a value that was set in a config (it differs from Megatron's
            default) and differs from the stated value. "override" replaces and reports it. "error"
            raises an error. "keep" keeps it. The precision always decides the mode and the scheme.
        strict: Whether the run begins after this sync. If so, a setting that Megatron is known to
            refuse later is an error too, and the sharding switches of optimizer and DDP are aligned
            as in Megatron Bridge's runtime (`bridge.sync.sync_plan`).

    Returns:
        Every precision field of every config with its old and new value, its verdict, what decided
        it, and why. A warning is logged for each set value that was replaced.

    Raises:
        PrecisionTypeError: There is no config, or an object is not a config or is the config of another
            name.
        PrecisionConfigError: The precision is wrong in any run.
        SyncConflictError: A conflict under `on_conflict="error"`.
        SyncCheckError: Megatron's validation or a rule refuses the result.
        UnknownPolicyError: `on_conflict` has an unknown value.
    """
    config = get_mixed_precision_config(precision)
    config.finalize()
    owners = {"model": model, "optimizer": optimizer, "ddp": ddp, "train": train}
    # The steps of a sync read `strict` as `is_last`: this is the last sync before the run.
    report = write_precision(config, owners, on_conflict=on_conflict, is_last=strict)
    for row in report.replaced:
        log.warning("%s", row)
    return report
