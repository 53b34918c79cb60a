"""`write`: plan, check on copies and by the rules, apply all or nothing."""

import contextlib
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bridge.errors import (
    Finding,
    SyncCheckError,
    SyncConflictError,
    UnknownPolicyError,
    close_matches,
    did_you_mean,
)
from bridge.model.reads import View
from bridge.precision.config import FIELDS, PrecisionConfig
from bridge.precision.mode import label_of
from bridge.precision.statements import field_value, is_stated, recipe_name, source_of
from bridge.precision.values import plain, torch_dtype
from bridge.rules.context import PRECISION_OWNERS, RuleContext, reading_of
from bridge.rules.rule import RuleFinding, ask, without_run
from bridge.rules.rulebook import BY_ID, RULES
from bridge.rules.sync_row import SyncRow
from bridge.sync.module_recipe import recipe_object
from bridge.sync.owner import (
    ABSENT,
    Owner,
    OwnerValues,
    annotated_class,
    class_defaults,
    in_one_form,
    refuse_wrong_objects,
    same,
)
from bridge.sync.prediction import Prediction, plan, scheme_after_sync
from bridge.sync.report import OVERRIDE, SyncReport
from bridge.sync.trial import try_on_copies
from bridge.target.fields import DEFAULTS
from bridge.target.target import Target
from bridge.target.versions import installed, installed_text

BF16_SUMS = "disable_bf16_reduced_precision_matmul"
"""Field that Megatron turns into a switch of the process."""

POLICIES = ("override", "error", "keep")

log = logging.getLogger(__name__)


def write(
    config: PrecisionConfig,
    given: Mapping[str, Any],
    *,
    on_conflict: str = "override",
    strict: bool = False,
    known: Prediction | None = None,
) -> SyncReport:
    """Write a finalized config into the objects that are given, role -> object or None.

    `known` is the run as it was foreseen, whose plan is applied where it
    was made for these very values.
    """
    _require_policy(on_conflict)
    owners = {role: Owner(role, target) for role, target in given.items() if target is not None}
    refuse_wrong_objects(owners.values())
    values = {role: owner.read() for role, owner in owners.items()}
    if known is not None and known.precision is config and known.owners == tuple(values.values()):
        planned: Sequence[SyncRow] = known.rows
    else:
        planned = plan(
            config, list(values.values()), keep_own=on_conflict == "keep", is_last=strict
        )
    rows = [_in_the_owners_form(row, owners[row.owner]) for row in planned]
    name = recipe_name(config) or "mixed_precision"
    if on_conflict == "error":
        _refuse_conflicts(name, rows)
    trial = try_on_copies(owners, rows, is_last=strict)
    asked = sync_findings(
        config,
        values,
        trial.rows,
        scheme=scheme_after_sync(config, values.values()),
        is_last=strict,
    )
    fatal = [finding for finding in trial.findings if finding.severity == "error"]
    refused = ("refused", "strict") if strict else ("refused",)
    fatal += [
        finding
        for finding in asked
        if finding.severity == "error" and BY_ID[finding.id].sync in refused
    ]
    if fatal:
        raise SyncCheckError(
            f"The recipe {name!r} cannot be written into these configs; nothing was changed:", fatal
        )
    apply(owners, trial.values)
    _forbid_bf16_sums(config, owners.get("model"))
    return SyncReport(
        precision=label_of(config),
        rows=(*trial.rows, *_process_rows(config)),
        findings=(*trial.findings, *asked),
        megatron_version=megatron_version(),
    )


def _require_policy(given: str) -> None:
    if given not in POLICIES:
        matches = ["error"] if given == "raise" else close_matches(str(given), POLICIES)
        rule = f"must be one of {', '.join(POLICIES)}"
        raise UnknownPolicyError.of("on_conflict", rule, given, did_you_mean(matches), matches)


def _in_the_owners_form(row: SyncRow, owner: Owner) -> SyncRow:
    """Return a row of the plan with the old and the new value as the object holds them."""
    if row.verdict == "absent":
        return row
    held = owner.value(row.attribute)
    for known in (
        held,
        owner.own(row.attribute),
        class_defaults(owner.defining).get(row.attribute, ABSENT),
    ):
        if same(in_one_form(known), row.new):
            return replace(row, old=held, new=known)
    new = row.new
    if row.field == "modules" and owner.is_megatron and new is not None:
        kind = annotated_class(owner.defining, row.attribute)
        new = recipe_object(kind, new, owner.target) if kind is not None else new
    elif row.field in FIELDS and FIELDS[row.field].kind == "dtype" and isinstance(new, str):
        new = torch_dtype(new)
    return replace(row, old=held, new=new)


def _forbid_bf16_sums(config: PrecisionConfig, model: Owner | None) -> None:
    """Set the switch of the process that Megatron sets where a model config is made with the field, and only then."""
    is_made = model is not None and model.is_megatron and not model.is_deferred
    if is_made and config.bf16 and is_stated(config, BF16_SUMS) and field_value(config, BF16_SUMS):
        sys.modules["torch"].backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def megatron_version() -> str:
    """Return the version of the megatron-core that is installed or on the path, or "unknown"."""
    return installed_text("mcore") or "unknown"


def _refuse_conflicts(name: str, rows: list[SyncRow]) -> None:
    conflicts = []
    for row in [row for row in rows if row.verdict == "override"]:
        by = {"mode": f"the recipe ({row.why})", "stated": "the config that states it"}.get(
            row.by, row.by
        )
        policies = "'override' or 'keep'" if row.can_be_kept else "'override'"
        finding = Finding(
            path=row.path,
            rule=f"its own value differs from {plain(row.new)!r} of {by}",
            value=plain(row.old),
            where="set by you or your model provider",
            remedy=f"Drop one of the two, or use on_conflict={policies}.",
            id=OVERRIDE,
        )
        conflicts.append(finding)
    if conflicts:
        raise SyncConflictError(
            f"The recipe {name!r} and the configs disagree; nothing was changed:", conflicts
        )


def _process_rows(config: PrecisionConfig) -> list[SyncRow]:
    row = SyncRow(
        owner="process",
        attribute="float32_matmul_precision",
        field="tf32",
        old=None,
        new="high" if config.tf32 else "highest",
        by=source_of(config, "tf32"),
        why="written by torch.set_float32_matmul_precision when the run starts",
    )
    return [row] if config.tf32 is not None else []


_RULES = without_run(rule for rule in RULES if rule.sync is not None)


def sync_findings(
    config: PrecisionConfig | None,
    owners: Mapping[str, OwnerValues],
    rows: Sequence[SyncRow],
    *,
    scheme: str | None = None,
    is_last: bool = False,
) -> list[RuleFinding]:
    """Return what the rules find in the owners as a plan leaves them.

    A field that an owner does not have is None; an owner that is not given holds what the precision
    reads as, and Megatron's defaults.
    """
    reading = reading_of(config) if config is not None else {}
    values = {role: {**DEFAULTS[role], **reading} for role in PRECISION_OWNERS}
    values |= {role: owner.section.held for role, owner in owners.items() if role in values}
    for row in rows:
        if row.owner in values and row.verdict != "absent":
            values[row.owner][row.attribute] = in_one_form(row.new)
    views = {role: View(of_role) for role, of_role in values.items()}
    given, target = frozenset(owners), Target(mcore=installed("mcore"), te=installed("te"))
    context = RuleContext(
        config, views=views, given=given, rows=rows, scheme=scheme, target=target, is_last=is_last
    )
    return ask(_RULES, context)


def apply(owners: Mapping[str, Owner], values: Mapping[str, Mapping[str, Any]]) -> None:
    """Write `values` (by role and attribute) and remember them; after an error every owner is as it was."""
    before = {
        role: dict(vars(owner.target))
        for role, owner in owners.items()
        if hasattr(owner.target, "__dict__")
    }
    done: list[tuple[Owner, str, Any]] = []
    try:
        for role, owner in owners.items():
            own = {name: owner.own(name) for name in values[role]}
            for name, value in values[role].items():
                done.append((owner, name, owner.value(name)))
                setattr(owner.target, name, value)
            owner.remember(values[role], own)
    except Exception as error:
        for owner, name, value in reversed(done):
            if name not in before.get(owner.role, ()):  # a property or a slot
                with contextlib.suppress(Exception):  # the one that refused refuses again
                    setattr(owner.target, name, value)
        for role, state in before.items():
            vars(owners[role].target).clear()
            vars(owners[role].target).update(state)
        owner, name, _ = done[-1]
        finding = Finding(
            path=f"{owner.role}.{name}",
            rule=f"cannot be set ({type(error).__name__}: {' '.join(str(error).split())})",
            value=values[owner.role][name],
            remedy=f"Make it writable, or give another object as {owner.role}.",
        )
        headline = "The recipe cannot be written into these configs; nothing was changed:"
        raise SyncCheckError(headline, [finding]) from error
