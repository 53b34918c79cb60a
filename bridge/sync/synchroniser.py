"""The synchroniser: plan, check on copies, apply. It takes a config; `bridge.synchronize` takes a recipe's name too."""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING, Any

from bridge.errors import Finding, PrecisionTypeError, SyncCheckError, SyncConflictError
from bridge.precision.config import FIELD_DEFAULTS
from bridge.sync.agreement import scheme_of
from bridge.sync.apply import apply
from bridge.sync.context import is_refused, sync_findings
from bridge.sync.owner import Owner, seen_through
from bridge.sync.plan import plan
from bridge.sync.report import OVERRIDE, SyncReport, SyncRow, plain
from bridge.sync.routes import OWNERS, ROUTES
from bridge.sync.trial import try_on_copies

if TYPE_CHECKING:
    from bridge.precision.config import PrecisionConfig

__all__ = ["megatron_version", "refuse_wrong_objects", "role_of", "run"]

ATTRIBUTES = frozenset(FIELD_DEFAULTS) | {route.attribute for route in ROUTES if route.attribute is not None}
"""Every name under which an owner may hold a field of a precision."""

KEEP = " or 'keep'"


def run(config: PrecisionConfig, owners: list[Owner], *, on_conflict: str, strict: bool) -> SyncReport:
    """Plan, check and apply for owners whose roles are known; see `bridge.synchronize`."""
    rows = plan(config, owners, keep_own=on_conflict == "keep", is_last=strict)
    name = config.recipe or "mixed_precision"
    if on_conflict == "error":
        _refuse_conflicts(name, rows)
    trial = try_on_copies(owners, rows, is_last=strict)
    by_role = {owner.role: owner for owner in owners}
    asked = sync_findings(config, by_role, trial.rows, scheme=scheme_of(config, owners), is_last=strict)
    fatal = [finding for finding in trial.findings if finding.severity == "error"]
    fatal += [finding for finding in asked if is_refused(finding, is_last=strict)]
    if fatal:
        raise SyncCheckError(f"The recipe {name!r} cannot be written into these configs; nothing was changed:", fatal)
    apply(owners, trial.values)
    return SyncReport(
        precision=config.label,
        rows=(*trial.rows, *_process_rows(config)),
        findings=(*trial.findings, *asked),
        megatron_version=megatron_version(),
    )


def refuse_wrong_objects(owners: list[Owner]) -> None:
    """Refuse to have no owner, and what cannot be one.

    That is a class, plain data, another role's config, one object in two roles, and one without any field to write.
    """
    if not owners:
        rule = "a sync writes into at least one of model, optimizer, ddp and train"
        raise PrecisionTypeError.of("model", rule, None, "Give the model's config, say.")
    seen: dict[int, str] = {}
    for owner in owners:
        target, role = owner.target, role_of(owner.target)
        kind = f"must be a config object in that role, got {target!r:.80}"
        if isinstance(target, type | str | dict | list | tuple | int | float):
            cls = OWNERS.get(owner.role, "one of Megatron's config classes")
            raise PrecisionTypeError(f"{owner.role}: {kind}. Give an instance of {cls}.")
        if role not in ("config", owner.role):
            raise PrecisionTypeError(f"{owner.role}: {kind}. Give it as {role}.")
        if id(target) in seen:
            what = f"is the same object as {seen[id(target)]}, and the two hold different things"
            raise PrecisionTypeError(f"{owner.role}: {what}. Give each role its own object.")
        if owner.role != "train" and not any(owner.has(name) for name in ATTRIBUTES):
            rule, remedy = "has no field of a precision", "Give the object that Megatron reads."
            raise PrecisionTypeError.of(owner.role, rule, target, remedy)
        seen[id(target)] = owner.role


def role_of(target: Any) -> str:
    """Return the role a config object plays, by its class; "config" for a class that is none of Megatron's."""
    bases = type(seen_through(target)).__mro__
    names = {base.__name__ for base in bases if base.__module__.startswith("megatron.core")}
    by_class = {cls: role for role, cls in OWNERS.items()}
    return next((by_class[name] for name in names if name in by_class), "config")


@functools.cache
def megatron_version() -> str:
    """Return the version of the installed megatron-core, or "unknown"."""
    try:
        return installed_version("megatron-core")
    except PackageNotFoundError:
        return "unknown"


def _refuse_conflicts(name: str, rows: list[SyncRow]) -> None:
    conflicts = [
        Finding(
            path=f"{row.owner}.{row.attribute}",
            rule=f"its own value differs from {plain(row.new)!r} of {_decision(row)}",
            value=plain(row.old),
            where="set by you or your model provider",
            remedy=f"Drop one of the two, or use on_conflict='override'{KEEP if row.can_be_kept else ''}.",
            id=OVERRIDE,
        )
        for row in rows
        if row.verdict == "override"
    ]
    if conflicts:
        raise SyncConflictError(f"The recipe {name!r} and the configs disagree; nothing was changed:", conflicts)


def _decision(row: SyncRow) -> str:
    """Return who decided, as a noun."""
    if row.by == "mode":
        return f"the recipe ({row.why})"
    return "the config that states it" if row.by == "stated" else row.by


def _process_rows(config: PrecisionConfig) -> list[SyncRow]:
    if config.tf32 is None:
        return []
    values = (None, "high" if config.tf32 else "highest")
    why = "written by torch.set_float32_matmul_precision when the run starts"
    row = SyncRow.derived(("process", "float32_matmul_precision"), values, by=config.source_of("tf32"), why=why)
    return [replace(row, field="tf32")]
