"""`last_sync`: the sync that a run begins after.

It applies the plan that a prediction of the run has made already, unless the owners have changed
since, and runs the checks of Megatron's that waited for it.
"""

import logging
from collections.abc import Mapping
from typing import Any

from bridge.errors import Finding, SyncCheckError
from bridge.rules.context import PRECISION_OWNERS
from bridge.rules.inert import BUFFER
from bridge.sync.owner import Owner
from bridge.sync.prediction import Prediction, sharding_rows, under_fsdp
from bridge.sync.report import SyncReport
from bridge.sync.synchroniser import sync_findings, write
from bridge.sync.trial import NO_TRANSFORMER_ENGINE, reason_of, refusal

log = logging.getLogger(__name__)


def last_sync(run: Any, precision: Any, known: Prediction | None = None) -> SyncReport | None:
    """Write a finalized precision into the sections of a run's container, and run the checks that waited for it.

    Args:
        run: A `ConfigContainer`, of ours or of Megatron Bridge; it holds the precision
            and the planned schedule then.
        precision: The config; None: the owners keep their own settings, which have to agree.
        known: The run as it was foreseen: its plan is applied unless
            the container has changed since.
    """
    given: dict[str, Any] = {role: getattr(run, role) for role in PRECISION_OWNERS}
    if any(owner is not None for owner in given.values()):
        given["train"] = run.train  # alone it holds nothing of a precision
    rows, schedule, report = getattr(run, "precision_schedule", None), None, None
    if rows is not None:
        from bridge.registry.schedule import PrecisionSchedule  # few runs have one

        owners, steps = {role: given[role] for role in PRECISION_OWNERS}, run.train.train_iters
        schedule = PrecisionSchedule(
            getattr(rows, "rows", rows), precision, train_iters=steps, **owners
        )
    if precision is None:
        _require_agreement(given)
        _share_sharding(given)
    else:
        report = write(precision, given, strict=True, known=known)
    _finalize(given)
    run.mixed_precision = precision
    if schedule is not None:
        run.precision_schedule = schedule
    return report


def _require_agreement(given: Mapping[str, Any]) -> None:
    """Refuse a model and an optimizer of different precision: without a recipe no other check would notice."""
    for name in ("fp16", "bf16"):
        ours, theirs = getattr(given["model"], name, None), getattr(given["optimizer"], name, None)
        if None not in (ours, theirs) and ours != theirs:
            rule = f"must equal optimizer.{name}, which is {theirs!r}"
            remedy = "Give both the same value, or choose a recipe."
            finding = Finding(path=f"model.{name}", rule=rule, value=ours, remedy=remedy)
            raise SyncCheckError(
                "Without a recipe the owners' own settings have to agree:", [finding]
            )


def _share_sharding(given: Mapping[str, Any]) -> None:
    """Bring the sharding of optimizer and DDP in step, as the sync of a recipe does."""
    owners = {
        role: Owner(role, given[role]) for role in ("optimizer", "ddp") if given[role] is not None
    }
    values = {role: owner.read() for role, owner in owners.items()}
    rows = sharding_rows(values)
    for finding in sync_findings(None, values, rows, is_last=True):
        log.warning("%s", finding)
    for row in rows:
        setattr(owners[row.owner].target, row.attribute, row.new)
    for role, owner in owners.items():
        if under_fsdp(values) and values[role].value(BUFFER) is True:
            log.warning("%s.%s: turned off, Megatron-FSDP does not implement it", role, BUFFER)
            setattr(owner.target, BUFFER, False)


def _finalize(given: Mapping[str, Any]) -> None:
    """Run Megatron's checks on an optimizer and a DDP config that put them off.

    A library that only this machine lacks is no fault of the configs; the
    run reports it where it needs it.
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
            finding = refusal(role, target, error, remedy="Change the setting it names.")
            raise SyncCheckError("These configs cannot be run:", [finding]) from error
