"""`write_precision`: a precision written into Megatron's configs, all or nothing.

    write(config, {"model": model, "optimizer": optimizer, "ddp": ddp})

The plan is made, tried on copies, checked by the rules, and then applied. After an error every
config is as it was.
"""

import contextlib
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bridge.errors import (
    Finding,
    SyncCheckError,
    SyncConflictError,
    UnknownPolicyError,
    close_matches,
    did_you_mean,
)
from bridge.model.read_tracking import AttributeView
from bridge.precision.coercion import get_torch_dtype, to_plain_data
from bridge.precision.config import FIELDS, PrecisionConfig
from bridge.precision.mode import format_label
from bridge.precision.statements import get_field_value, get_recipe_name, get_source, is_stated
from bridge.rules.context import PRECISION_OWNERS, RuleContext, get_effective_values
from bridge.rules.rule import RuleFinding, cast_to_precision_rules, evaluate_rules
from bridge.rules.rulebook import RULES, RULES_BY_ID
from bridge.rules.sync_row import SyncRow
from bridge.sync.module_recipe import build_recipe_object
from bridge.sync.owner import (
    ABSENT,
    Owner,
    OwnerValues,
    find_annotated_class,
    get_class_defaults,
    is_same_value,
    normalise_value,
    refuse_non_owners,
)
from bridge.sync.prediction import Prediction
from bridge.sync.report import OVERRIDE_RULE_ID, SyncReport
from bridge.sync.sync_plan import get_scheme_after_sync, plan_sync
from bridge.sync.trial import validate_on_copies
from bridge.target.fields import OWNER_DEFAULTS
from bridge.target.target import Target
from bridge.target.versions import get_installed_text, get_installed_version

BF16_REDUCTION_FIELD = "disable_bf16_reduced_precision_matmul"
"""Field that Megatron turns into a switch of the process."""

CONFLICT_POLICIES = ("override", "error", "keep")

log = logging.getLogger(__name__)


def write_precision(
    config: PrecisionConfig,
    objects: Mapping[str, Any],
    *,
    on_conflict: str = "override",
    is_last: bool = False,
    prediction: Prediction | None = None,
) -> SyncReport:
    """Write a finalized config into config objects, all or nothing.

    Args:
        config: The precision.
        objects: Role -> object, or None for a role without one.
        on_conflict: A policy of `CONFLICT_POLICIES`.
        is_last: The run begins after this sync.
        prediction: A prediction of this run. Its rows are used if they were made for this precision
            and these values of the owners.

    Raises:
        PrecisionTypeError: An object that is no config, or that plays another role.
        SyncConflictError: A conflict under the policy "error".
        SyncCheckError: Megatron's validation or a rule refuses the result.
    """
    _require_policy(on_conflict)
    owners = {role: Owner(role, target) for role, target in objects.items() if target is not None}
    refuse_non_owners(owners.values())
    values = {role: owner.read() for role, owner in owners.items()}
    planned: Sequence[SyncRow]
    if prediction is not None and _is_prediction_of(prediction, config, values):
        planned = prediction.rows
    else:
        keep_own = on_conflict == "keep"
        planned = plan_sync(
            config, list(values.values()), keep_owner_values=keep_own, is_last=is_last
        )
    rows = [_convert_row_values(row, owners[row.owner]) for row in planned]
    name = get_recipe_name(config) or "mixed_precision"
    if on_conflict == "error":
        _refuse_conflicts(name, rows)
    trial = validate_on_copies(owners, rows, is_last=is_last)
    scheme = get_scheme_after_sync(config, values.values())
    findings = check_sync_rules(config, values, trial.rows, scheme=scheme, is_last=is_last)
    _refuse_errors(name, trial.findings, findings, is_last=is_last)
    apply_values(owners, trial.values)
    _disable_bf16_reduction(config, owners.get("model"))
    return SyncReport(
        precision=format_label(config),
        rows=(*trial.rows, *_make_process_rows(config)),
        findings=(*trial.findings, *findings),
        megatron_version=get_megatron_version(),
    )


def _is_prediction_of(
    prediction: Prediction, config: PrecisionConfig, values: Mapping[str, OwnerValues]
) -> bool:
    """Return whether a prediction was made for this precision and these values of the owners."""
    return prediction.precision is config and prediction.owners == tuple(values.values())


def _refuse_errors(
    name: str, of_megatron: Iterable[Finding], of_rules: Iterable[RuleFinding], *, is_last: bool
) -> None:
    """Raise a SyncCheckError with the errors that refuse the sync."""
    refusing = ["refused"]
    if is_last:
        refusing.append("last")
    fatal = [finding for finding in of_megatron if finding.severity == "error"]
    for finding in of_rules:
        if finding.severity == "error" and RULES_BY_ID[finding.id].sync in refusing:
            fatal.append(finding)
    if fatal:
        headline = f"The recipe {name!r} cannot be written into these configs; nothing was changed:"
        raise SyncCheckError(headline, fatal)


def _require_policy(policy: str) -> None:
    """Refuse a policy that is none of `CONFLICT_POLICIES`."""
    if policy in CONFLICT_POLICIES:
        return
    matches = close_matches(str(policy), CONFLICT_POLICIES)
    if policy == "raise":
        matches = ["error"]
    rule = f"must be one of {', '.join(CONFLICT_POLICIES)}"
    raise UnknownPolicyError.of("on_conflict", rule, policy, did_you_mean(matches), matches)


def _convert_row_values(row: SyncRow, owner: Owner) -> SyncRow:
    """Return a row of the plan with the old and the new value as the object holds them."""
    if row.verdict == "absent":
        return row
    old = owner.value(row.attribute)
    default = get_class_defaults(owner.defining).get(row.attribute, ABSENT)
    for value in (old, owner.own(row.attribute), default):
        if is_same_value(normalise_value(value), row.new):
            return replace(row, old=old, new=value)
    return replace(row, old=old, new=_convert_new_value(row, owner))


def _convert_new_value(row: SyncRow, owner: Owner) -> Any:
    """Return the new value of a row as an object of the type that the owner takes."""
    new = row.new
    if row.field == "modules" and owner.is_megatron and new is not None:
        kind = find_annotated_class(owner.defining, row.attribute)
        if kind is not None:
            return build_recipe_object(kind, new, owner.target)
    elif row.field in FIELDS and FIELDS[row.field].kind == "dtype" and isinstance(new, str):
        return get_torch_dtype(new)
    return new


def _disable_bf16_reduction(config: PrecisionConfig, model: Owner | None) -> None:
    """Set the switch of the process that Megatron sets where it makes such a model config.

    Megatron sets it in BF16 alone, and never for a config that waits for `finalize`.
    """
    is_made = model is not None and model.is_megatron and not model.is_deferred
    if (
        is_made
        and config.bf16
        and is_stated(config, BF16_REDUCTION_FIELD)
        and get_field_value(config, BF16_REDUCTION_FIELD)
    ):
        sys.modules["torch"].backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def get_megatron_version() -> str:
    """Return the version of the megatron-core that is installed or on the path, or "unknown"."""
    return get_installed_text("mcore") or "unknown"


DECIDER_NOUNS = {"stated": "the config that states it"}
"""`SyncRow.by` -> its noun in the message about a conflict, where the word is no noun."""


def _refuse_conflicts(name: str, rows: list[SyncRow]) -> None:
    """Raise a SyncConflictError with the owners' values that the recipe would replace."""
    conflicts = [_make_conflict_finding(row) for row in rows if row.verdict == "override"]
    if conflicts:
        raise SyncConflictError(
            f"The recipe {name!r} and the configs disagree; nothing was changed:", conflicts
        )


def _make_conflict_finding(row: SyncRow) -> Finding:
    """Return the finding about an owner's value that differs from the recipe's."""
    decider = DECIDER_NOUNS.get(row.by, row.by)
    if row.by == "mode":
        decider = f"the recipe ({row.why})"
    policies = "'override'"
    if row.can_be_kept:
        policies = "'override' or 'keep'"
    return Finding(
        path=row.path,
        rule=f"its own value differs from {to_plain_data(row.new)!r} of {decider}",
        value=to_plain_data(row.old),
        where="set by you or your model provider",
        remedy=f"Drop one of the two, or use on_conflict={policies}.",
        id=OVERRIDE_RULE_ID,
    )


def _make_process_rows(config: PrecisionConfig) -> list[SyncRow]:
    """Return the row of the switch of TF32, which is written into the process at the start."""
    if config.tf32 is None:
        return []
    precision = "highest"
    if config.tf32:
        precision = "high"
    row = SyncRow(
        owner="process",
        attribute="float32_matmul_precision",
        field="tf32",
        old=None,
        new=precision,
        by=get_source(config, "tf32"),
        why="written by torch.set_float32_matmul_precision when the run starts",
    )
    return [row]


_SYNC_RULES = cast_to_precision_rules(rule for rule in RULES if rule.sync is not None)


def check_sync_rules(
    config: PrecisionConfig | None,
    owners: Mapping[str, OwnerValues],
    rows: Sequence[SyncRow],
    *,
    scheme: str | None = None,
    is_last: bool = False,
) -> list[RuleFinding]:
    """Return the findings of the rules about the owners as a plan leaves them.

    Args:
        config: The precision; None: the owners keep their settings.
        owners: Role -> the values of the owner before the sync.
        rows: The plan.
        scheme: The scaling scheme after the sync.
        is_last: The run begins after this sync.
    """
    values = _compute_values_after(config, owners, rows)
    context = RuleContext(
        config,
        views={role: AttributeView(of_role) for role, of_role in values.items()},
        present=frozenset(owners),
        rows=rows,
        scheme=scheme,
        target=Target(mcore=get_installed_version("mcore"), te=get_installed_version("te")),
        is_last=is_last,
    )
    return evaluate_rules(_SYNC_RULES, context)


def _compute_values_after(
    config: PrecisionConfig | None,
    owners: Mapping[str, OwnerValues],
    rows: Sequence[SyncRow],
) -> dict[str, dict[str, Any]]:
    """Return role -> field -> value after the sync.

    An owner that is not there has the values that the precision reads as, and Megatron's defaults.
    """
    reading: Mapping[str, Any] = {}
    if config is not None:
        reading = get_effective_values(config)
    values: dict[str, dict[str, Any]] = {}
    for role in PRECISION_OWNERS:
        if role in owners:
            values[role] = owners[role].section.stated_or_none
        else:
            values[role] = {**OWNER_DEFAULTS[role], **reading}
    for row in rows:
        if row.owner in values and row.verdict != "absent":
            values[row.owner][row.attribute] = normalise_value(row.new)
    return values


def apply_values(owners: Mapping[str, Owner], values: Mapping[str, Mapping[str, Any]]) -> None:
    """Write values into the owners, and remember them; after an error every owner is as it was.

    Args:
        owners: Role -> the owner.
        values: Role -> attribute -> the value.

    Raises:
        SyncCheckError: An attribute that cannot be set.
    """
    states = {}
    for role, owner in owners.items():
        if hasattr(owner.target, "__dict__"):
            states[role] = dict(vars(owner.target))
    written: list[_AttributeWrite] = []
    try:
        for role, owner in owners.items():
            own = {name: owner.own(name) for name in values[role]}
            for name, value in values[role].items():
                written.append(_AttributeWrite(owner, name, owner.value(name)))
                setattr(owner.target, name, value)
            owner.remember(values[role], own)
    except Exception as error:
        _restore_owners(owners, states, written)
        owner, name, _ = written[-1]
        finding = Finding(
            path=f"{owner.role}.{name}",
            rule=f"cannot be set ({type(error).__name__}: {' '.join(str(error).split())})",
            value=values[owner.role][name],
            remedy=f"Make it writable, or give another object as {owner.role}.",
        )
        headline = "The recipe cannot be written into these configs; nothing was changed:"
        raise SyncCheckError(headline, [finding]) from error


class _AttributeWrite(NamedTuple):
    """An attribute that was written, or that could not be set."""

    owner: Owner
    name: str
    before: Any


def _restore_owners(
    owners: Mapping[str, Owner],
    states: Mapping[str, Mapping[str, Any]],
    written: Sequence[_AttributeWrite],
) -> None:
    """Give every owner the values that it had before."""
    for owner, name, before in reversed(written):
        if name not in states.get(owner.role, ()):  # a property or a slot
            with contextlib.suppress(Exception):  # the attribute that refused refuses again
                setattr(owner.target, name, before)
    for role, state in states.items():
        attributes = vars(owners[role].target)
        attributes.clear()
        attributes.update(state)
