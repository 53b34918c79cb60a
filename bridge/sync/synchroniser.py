"""`synchronize`: plan, check on copies and by the rules, apply all or nothing.

`last_sync` is the sync that a run begins after. It applies the plan that a prediction of the run has made already,
unless the owners have changed since, and runs the checks of Megatron's that waited for it.
"""

import contextlib
import copy
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bridge.errors import Finding, SyncCheckError, SyncConflictError, UnknownPolicyError, close_matches, did_you_mean
from bridge.precision.config import FIELDS, PrecisionConfig
from bridge.precision.mode import label_of
from bridge.precision.owners import DdpOwner, ModelOwner, OptimizerOwner
from bridge.precision.statements import field_value, is_stated, recipe_name, source_of
from bridge.precision.values import plain, torch_dtype
from bridge.registry.config import MixedPrecisionConfig, PeerConfig
from bridge.registry.registry import get_mixed_precision_config
from bridge.rules.context import PRECISION_OWNERS, RuleContext, reading_of
from bridge.rules.fields import DEFAULTS
from bridge.rules.inert import BUFFER
from bridge.rules.reads import View
from bridge.rules.rule import RuleFinding, ask, without_run
from bridge.rules.rulebook import BY_ID, RULES
from bridge.rules.sync_row import SyncRow
from bridge.rules.target import Target
from bridge.rules.versions import installed, installed_text
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
from bridge.sync.prediction import Prediction, plan, scheme_after_sync, sharding_rows, under_fsdp
from bridge.sync.report import OVERRIDE, SyncReport

BF16_SUMS = "disable_bf16_reduced_precision_matmul"
"""Field that Megatron turns into a switch of the process."""

POLICIES = ("override", "error", "keep")

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
            optimizer and DDP in step as Megatron Bridge's runtime does (`bridge.sync.prediction`).

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
    given = {"model": model, "optimizer": optimizer, "ddp": ddp, "train": train}
    report = write(config, given, on_conflict=on_conflict, strict=strict)
    report.log_overrides(log)
    return report


def write(
    config: PrecisionConfig,
    given: Mapping[str, Any],
    *,
    on_conflict: str = "override",
    strict: bool = False,
    known: Prediction | None = None,
) -> SyncReport:
    """Write a finalized config into the objects that are given, role -> object or None; see `synchronize`.

    `known` is the run as it was foreseen, whose plan is applied where it was made for these very values.
    """
    _require_policy(on_conflict)
    owners = {role: Owner(role, target) for role, target in given.items() if target is not None}
    refuse_wrong_objects(owners.values())
    values = {role: owner.read() for role, owner in owners.items()}
    if known is not None and known.precision is config and known.owners == tuple(values.values()):
        planned: Sequence[SyncRow] = known.rows
    else:
        planned = plan(config, list(values.values()), keep_own=on_conflict == "keep", is_last=strict)
    rows = [_in_the_owners_form(row, owners[row.owner]) for row in planned]
    name = recipe_name(config) or "mixed_precision"
    if on_conflict == "error":
        _refuse_conflicts(name, rows)
    trial = try_on_copies(owners, rows, is_last=strict)
    asked = sync_findings(config, values, trial.rows, scheme=scheme_after_sync(config, values.values()), is_last=strict)
    fatal = [finding for finding in trial.findings if finding.severity == "error"]
    refused = ("refused", "strict") if strict else ("refused",)
    fatal += [finding for finding in asked if finding.severity == "error" and BY_ID[finding.id].sync in refused]
    if fatal:
        raise SyncCheckError(f"The recipe {name!r} cannot be written into these configs; nothing was changed:", fatal)
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
    for known in (held, owner.own(row.attribute), class_defaults(owner.defining).get(row.attribute, ABSENT)):
        if same(in_one_form(known), row.new):
            return replace(row, old=held, new=known)
    new = row.new
    if row.field == "modules" and owner.is_megatron and new is not None:
        kind = annotated_class(owner.defining, row.attribute)
        new = recipe_object(kind, new, owner.target) if kind is not None else new
    elif row.field in FIELDS and FIELDS[row.field].kind == "dtype" and isinstance(new, str):
        new = torch_dtype(new)
    return replace(row, old=held, new=new)


def last_sync(run: Any, precision: Any, known: Prediction | None = None) -> SyncReport | None:
    """Write a finalized precision into the sections of a run's container, and run the checks that waited for it.

    Args:
        run: A `ConfigContainer`, of ours or of Megatron Bridge; it holds the precision and the planned schedule then.
        precision: The config; None: the owners keep their own settings, which have to agree.
        known: The run as it was foreseen: its plan is applied unless the container has changed since.
    """
    given: dict[str, Any] = {role: getattr(run, role) for role in PRECISION_OWNERS}
    if any(owner is not None for owner in given.values()):
        given["train"] = run.train  # alone it holds nothing of a precision
    rows, schedule, report = getattr(run, "precision_schedule", None), None, None
    if rows is not None:
        from bridge.sync.schedule import PrecisionSchedule  # few runs have one

        owners, steps = {role: given[role] for role in PRECISION_OWNERS}, run.train.train_iters
        schedule = PrecisionSchedule(getattr(rows, "rows", rows), precision, train_iters=steps, **owners)
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
            raise SyncCheckError("Without a recipe the owners' own settings have to agree:", [finding])


def _share_sharding(given: Mapping[str, Any]) -> None:
    """Bring the sharding of optimizer and DDP in step, as the sync of a recipe does."""
    owners = {role: Owner(role, given[role]) for role in ("optimizer", "ddp") if given[role] is not None}
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
            finding = _refusal(role, target, error, remedy="Change the setting it names.")
            raise SyncCheckError("These configs cannot be run:", [finding]) from error


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
        by = {"mode": f"the recipe ({row.why})", "stated": "the config that states it"}.get(row.by, row.by)
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
        raise SyncConflictError(f"The recipe {name!r} and the configs disagree; nothing was changed:", conflicts)


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


NO_TRANSFORMER_ENGINE = "needs Transformer Engine, which is not installed here"
"""The one reason that lies in this machine and not in the config."""

FUSED_SWITCH = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"
"""Megatron's derived switch: the fused Adam of the precision-aware optimizer holds the masters."""
DERIVED = (
    "autocast_dtype",
    FUSED_SWITCH,
    "store_param_remainders",
    "attention_softmax_in_fp32",
    "pipeline_dtype",
)
"""Attributes that Megatron computes once in `__post_init__`, stale after a plain assignment."""
MASTERS_OF_FUSED = {
    True: "the fused Adam holds the masters: with param remainders 2 bytes a BF16 parameter, before 4",
    False: "Megatron holds FP32 masters: 4 bytes a parameter, before 2 of a BF16 one with param remainders",
}
"""New value of the switch -> what changes by it."""
OVERRULED_BY = {"attention_softmax_in_fp32": "Drop it, or set apply_query_key_layer_scaling=False."}
"""Attribute of `DERIVED` -> the remedy where a stated value of it does not stay."""


class Trial(NamedTuple):
    """The outcome on copies."""

    rows: list[SyncRow]
    """The plan with what Megatron derived, owner by owner."""
    findings: list[Finding]
    values: dict[str, dict[str, Any]]
    """Role -> attribute -> the value that the owner has to take."""


def try_on_copies(owners: Mapping[str, Owner], rows: list[SyncRow], *, is_last: bool = False) -> Trial:
    """Apply `rows` to copies of the owners and let Megatron validate them.

    Findings of severity "error" mean that the plan must not be applied, "warning" that Megatron's validation
    refuses the owner as it was, too, or that it would refuse a model that is not complete yet. With `is_last` what
    waits for `finalize` is judged as what is made already.
    """
    findings: list[Finding] = []
    taken: dict[str, dict[str, Any]] = {}
    tried: list[SyncRow] = []
    for role, owner in owners.items():
        own = [row for row in rows if row.owner == role]
        wanted = {row.attribute: row.new for row in own if row.verdict != "absent"}
        taken[role] = {name: value for name, value in wanted.items() if not same(owner.value(name), value)}
        if owner.is_megatron:
            twin, finding = _validated_copy(owner, wanted, is_last=is_last)
            derived = _difference(owner, twin, wanted)
            findings += [*_overruled(own, derived), *([finding] if finding is not None else [])]
            own = _with_derived(own, owner, derived)
            taken[role] |= derived
        tried += own
    return Trial(tried, findings, taken)


def _validated_copy(owner: Owner, values: dict[str, Any], *, is_last: bool) -> tuple[Any, Finding | None]:
    twin = copy.copy(owner.target)
    vars(twin).update(values)
    error = _post_init(owner, twin)
    if error is None:
        return twin, None
    untouched = copy.copy(owner.target)
    vars(untouched).update({name: owner.own(name) for name in values})
    before = _post_init(owner, untouched)
    was_so = before is not None and str(before) == str(error)
    severity = "warning" if was_so else "error"
    if owner.is_deferred and owner.role == "model":  # its layers and sizes may still change
        if before is not None:
            return twin, None
        severity = "warning"
    elif owner.is_deferred and is_last and reason_of(error) != NO_TRANSFORMER_ENGINE:  # `finalize` is called next
        severity = "error"
    where = "as it was before the recipe, too" if was_so else "with the recipe's values"
    remedy = "Change the setting it names, or choose another recipe."
    return twin, _refusal(owner.role, owner.target, error, remedy=remedy, where=where, severity=severity)


def _refusal(role: str, target: Any, error: Exception, **parts: Any) -> Finding:
    rule = f"Megatron's own validation refuses it ({reason_of(error)})"
    return Finding(path=role, rule=rule, value=type(target).__name__, **parts)


def reason_of(error: Exception) -> str:
    """Return what Megatron's validation says, in one line."""
    reason = " ".join(str(error).split()) or type(error).__name__
    # megatron-core 0.16 compares with a version that is not there.
    is_missing = isinstance(error, TypeError) and "Version" in reason
    return NO_TRANSFORMER_ENGINE if is_missing or "TransformerEngine, but not found" in reason else reason


def _post_init(owner: Owner, twin: Any) -> Exception | None:
    """Run Megatron's validation on a copy; its warnings were given when the object was made.

    A switch of the process that it sets is as before.
    """
    torch: Any = sys.modules.get("torch")
    matmul = torch.backends.cuda.matmul if torch is not None else None
    before = matmul.allow_bf16_reduced_precision_reduction if matmul is not None else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (owner.defining if owner.is_deferred else type(twin)).__post_init__(twin)
    except Exception as error:  # noqa: BLE001  whatever Megatron raises is its answer
        return error
    finally:
        if matmul is not None:
            matmul.allow_bf16_reduced_precision_reduction = before
    return None


def _difference(owner: Owner, twin: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return what Megatron derived on the copy: precision attributes that neither the plan nor the owner had so.

    Fields of an owner that waits for `finalize` are left to that: they depend on what may still be changed.
    """
    left = class_defaults(owner.defining) if owner.is_deferred else {}
    found = {name: vars(twin)[name] for name in DERIVED if name in vars(twin) and name not in left}
    planned = {name: wanted.get(name, getattr(owner.target, name, None)) for name in found}
    return {name: value for name, value in found.items() if not same(planned[name], value)}


def _with_derived(rows: list[SyncRow], owner: Owner, derived: dict[str, Any]) -> list[SyncRow]:
    by = "Megatron"
    changed = {row.attribute: row for row in rows}
    for name, new in derived.items():
        why = "computed by Megatron's own __post_init__"
        if name == FUSED_SWITCH:
            why = MASTERS_OF_FUSED[new is True]
        old = getattr(owner.target, name, None)  # a config that waits for `finalize` has not computed it yet
        made = SyncRow(owner=owner.role, attribute=name, old=old, new=new, by=by, why=why)
        changed[name] = replace(changed.get(name, made), new=new, verdict="derive", by=by, why=why)
    return list(changed.values())


def _overruled(rows: Sequence[SyncRow], derived: Mapping[str, Any]) -> list[Finding]:
    """Return a warning for each stated value that Megatron replaces by one of its own."""
    return [
        Finding(
            path=row.path,
            rule=f"Megatron's own __post_init__ sets it to {plain(derived[row.attribute])!r}",
            value=plain(row.new),
            where=row.by,
            remedy=OVERRULED_BY.get(row.attribute, "Drop it, or change the setting that it follows from."),
            severity="warning",
        )
        for row in rows
        if row.attribute in derived and row.why == "stated" and row.verdict != "absent"
    ]


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

    A field that an owner does not have is None; an owner that is not given holds what the precision reads as, and
    Megatron's defaults.
    """
    reading = reading_of(config) if config is not None else {}
    values = {role: {**DEFAULTS[role], **reading} for role in PRECISION_OWNERS}
    values |= {role: owner.section.held for role, owner in owners.items() if role in values}
    for row in rows:
        if row.owner in values and row.verdict != "absent":
            values[row.owner][row.attribute] = in_one_form(row.new)
    views = {role: View(of_role) for role, of_role in values.items()}
    given, target = frozenset(owners), Target(mcore=installed("mcore"), te=installed("te"))
    context = RuleContext(config, views=views, given=given, rows=rows, scheme=scheme, target=target, is_last=is_last)
    return ask(_RULES, context)


def apply(owners: Mapping[str, Owner], values: Mapping[str, Mapping[str, Any]]) -> None:
    """Write `values` (by role and attribute) and remember them; after an error every owner is as it was."""
    before = {role: dict(vars(owner.target)) for role, owner in owners.items() if hasattr(owner.target, "__dict__")}
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
