"""`synchronize`: plan, check on copies, apply."""

from __future__ import annotations

import functools
import re
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING, Any

from bridge.errors import Finding, PrecisionTypeError, SyncCheckError, SyncConflictError
from bridge.precision.registry import get_mixed_precision_config
from bridge.sync.agreement import scheme_of
from bridge.sync.apply import apply
from bridge.sync.effect import absent_findings, effect_findings
from bridge.sync.owner import Owner, seen_through
from bridge.sync.plan import plan
from bridge.sync.report import SyncReport, SyncRow, plain
from bridge.sync.routes import OWNERS
from bridge.sync.situation import Situation
from bridge.sync.trial import try_on_copies

if TYPE_CHECKING:
    from bridge.precision.config import MixedPrecisionConfig
    from bridge.precision.peer import PeerConfig

__all__ = ["megatron_version", "role_of", "synchronize"]

POLICIES = ("override", "error", "keep")


def synchronize(
    precision: str | MixedPrecisionConfig | PeerConfig,
    *,
    model: Any = None,
    optimizer: Any = None,
    ddp: Any = None,
    train: Any = None,
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
        strict: The run begins after this sync: raise also on what Megatron is known to refuse later, and settle what
            Megatron Bridge's runtime settles between optimizer and DDP (`bridge.sync.sharding`).

    Returns:
        Every precision field of every owner, with old and new value, verdict, who decided, and why.

    Raises:
        PrecisionTypeError: An owner is no config object, or plays another role.
        PrecisionConfigError: The config can never be right.
        SyncConflictError: A conflict under `on_conflict="error"`.
        SyncCheckError: The result would not pass Megatron's validation or the owners would disagree.
        ValueError: An unknown `on_conflict`.
    """
    if on_conflict not in POLICIES:
        raise ValueError(f"on_conflict: must be one of {', '.join(POLICIES)}, got {on_conflict!r}.")
    config = get_mixed_precision_config(precision)
    config.finalize()
    given = {"model": model, "optimizer": optimizer, "ddp": ddp, "train": train}
    owners = [Owner(role, target) for role, target in given.items() if target is not None]
    _refuse_wrong_objects(owners)
    return run(config, owners, on_conflict=on_conflict, strict=strict)


def run(config: MixedPrecisionConfig, owners: list[Owner], *, on_conflict: str, strict: bool) -> SyncReport:
    """Plan, check and apply for owners whose roles are known; see `synchronize`."""
    rows = plan(config, owners, keep_own=on_conflict == "keep", is_last=strict)
    name = config.recipe or "mixed_precision"
    if on_conflict == "error":
        _refuse_conflicts(name, rows)
    trial = try_on_copies(config, owners, rows, is_last=strict)
    version = megatron_version()
    by_role = {owner.role: owner for owner in owners}
    now = Situation(
        config=config,
        owners=by_role,
        rows={(row.owner, row.attribute): row for row in trial.rows},
        scheme=scheme_of(config, owners),
        version=_numbers(version),
        is_last=strict,
    )
    findings = [*trial.findings, *absent_findings(config, rows, version, by_role), *effect_findings(now)]
    fatal = [f for f in trial.findings if f.severity == "error"]
    if strict:
        fatal += [f for f in findings if f.severity == "error" and f not in fatal]
    if fatal:
        raise SyncCheckError(f"The recipe {name!r} cannot be written into these configs; nothing was changed:", fatal)
    apply(owners, trial.values)
    return SyncReport(
        precision=config.label,
        rows=(*trial.rows, *_process_rows(config)),
        findings=tuple(findings),
        megatron_version=version,
    )


def _refuse_wrong_objects(owners: list[Owner]) -> None:
    """Refuse what cannot be an owner: a class, plain data, another role's config, one object in two roles."""
    seen: dict[int, str] = {}
    for owner in owners:
        target, role = owner.target, role_of(owner.target)
        kind = f"must be a config object in that role, got {target!r:.80}"
        if isinstance(target, type | str | dict | list | tuple | int | float):
            raise PrecisionTypeError(f"{owner.role}: {kind}. Give an instance of {OWNERS[owner.role]}.")
        if role not in ("config", owner.role):
            raise PrecisionTypeError(f"{owner.role}: {kind}. Give it as {role}.")
        if id(target) in seen:
            what = f"is the same object as {seen[id(target)]}, and the two hold different things"
            raise PrecisionTypeError(f"{owner.role}: {what}. Give each role its own object.")
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


def _numbers(version: str) -> tuple[int, ...] | None:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else None


def _refuse_conflicts(name: str, rows: list[SyncRow]) -> None:
    conflicts = [
        Finding(
            path=f"{row.owner}.{row.attribute}",
            rule=f"its own value differs from {plain(row.new)!r} of {row.by}",
            value=plain(row.old),
            where="set by you or your model provider",
            remedy="Drop one of the two, or use on_conflict='override' or 'keep'.",
        )
        for row in rows
        if row.verdict == "override"
    ]
    if conflicts:
        raise SyncConflictError(f"The recipe {name!r} and the configs disagree; nothing was changed:", conflicts)


def _process_rows(config: MixedPrecisionConfig) -> list[SyncRow]:
    if config.tf32 is None:
        return []
    new = "high" if config.tf32 else "highest"
    why = "written by torch.set_float32_matmul_precision when the run starts"
    return [
        SyncRow(
            owner="process",
            attribute="float32_matmul_precision",
            field="tf32",
            old=None,
            new=new,
            verdict="derive",
            by=config.source_of("tf32"),
            why=why,
        )
    ]
