"""`last_sync`: the sync that a run begins after, and what a run without a recipe needs instead of it."""

import logging
from collections.abc import Mapping
from typing import Any

from bridge.errors import Finding, SyncCheckError
from bridge.precision.config import PrecisionConfig
from bridge.sync.owner import Owner
from bridge.sync.plan import BUFFER, sharding_rows, under_fsdp
from bridge.sync.report import SyncReport
from bridge.sync.synchroniser import NO_TRANSFORMER_ENGINE, reason_of, sync_findings, synchronize

log = logging.getLogger(__name__)


def last_sync(config: PrecisionConfig | None, given: Mapping[str, Any]) -> SyncReport | None:
    """Write a finalized config into the objects of a run, and run the checks that waited for it.

    Args:
        config: The precision; None: the owners keep their own settings, which have to agree.
        given: Role -> object, or None where there is none.
    """
    report = None
    if config is None:
        _require_agreement(given)
        _share_sharding(given)
    else:
        report = synchronize(config, given, strict=True)
    _finalize(given)
    return report


def _require_agreement(given: Mapping[str, Any]) -> None:
    """Refuse a model and an optimizer of different precision: without a recipe no other check would notice."""
    for name in ("fp16", "bf16"):
        ours, theirs = getattr(given["model"], name, None), getattr(given["optimizer"], name, None)
        if None not in (ours, theirs) and ours != theirs:
            finding = Finding(
                path=f"model.{name}",
                rule=f"must equal optimizer.{name}, which is {theirs!r}",
                value=ours,
                remedy="Give both the same value, or choose a recipe.",
            )
            raise SyncCheckError("Without a recipe the owners' own settings have to agree:", [finding])


def _share_sharding(given: Mapping[str, Any]) -> None:
    """Bring the sharding of optimizer and DDP in step, as the sync of a recipe does."""
    owners = {role: Owner(role, given[role]) for role in ("optimizer", "ddp") if given[role] is not None}
    rows = sharding_rows(owners)
    for finding in sync_findings(None, owners, rows, is_last=True):
        log.warning("%s", finding)
    for row in rows:
        setattr(owners[row.owner].target, row.attribute, row.new)
    for role, owner in owners.items():
        if under_fsdp(owners) and owner.value(BUFFER) is True:
            log.warning("%s.%s: turned off, Megatron-FSDP does not implement it", role, BUFFER)
            setattr(owner.target, BUFFER, False)


def _finalize(given: Mapping[str, Any]) -> None:
    """Run Megatron's checks on an optimizer and a DDP config that put them off.

    A library that only this machine lacks is no fault of the configs; the run reports it where it needs it.
    """
    for role in ("optimizer", "ddp"):
        target = given[role]
        if target is None or not Owner(role, target).is_deferred:
            continue
        try:
            target.finalize()
        except Exception as error:  # Megatron's checks raise whatever comes to hand
            if reason_of(error) == NO_TRANSFORMER_ENGINE:
                continue
            finding = Finding(
                path=role,
                rule=f"Megatron's own validation refuses it ({reason_of(error)})",
                value=type(target).__name__,
                remedy="Change the setting it names.",
            )
            raise SyncCheckError("These configs cannot be run:", [finding]) from error
