"""`write_precision`: a precision written into Megatron's configs, all or nothing.

    write_precision(precision, {"model": model, "optimizer": optimizer, "ddp": ddp})

A plan is made, tried on copies, checked by the rules, and then applied. After an error every config
is restored. A value that cannot be restored is named in the error.
"""

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
from bridge.precision.mode import format_label
from bridge.precision.owners import ConfigObject
from bridge.precision.precision_config import FIELDS, PrecisionConfig
from bridge.precision.statements import get_field_value, get_recipe_name, get_source, is_stated
from bridge.rules.context import PRECISION_OWNERS, RuleContext, get_effective_values
from bridge.rules.rule import RuleFinding, cast_to_precision_rules, evaluate_rules
from bridge.rules.rulebook import RULES, RULES_BY_ID
from bridge.rules.sync_row import Decider, SyncRow
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
"""The reactions to a value that was set in an owner and that differs from the precision."""
DECIDER_NOUNS = {"stated": "the config that states it"}
"""Name of a decider -> its noun in the message about a conflict, if they differ."""

log = logging.getLogger(__name__)

_SYNC_RULES = cast_to_precision_rules(rule for rule in RULES if rule.sync is not None)


def write_precision(
    precision: PrecisionConfig,
    configs: Mapping[str, ConfigObject | None],
    *,
    on_conflict: str = "override",
    is_last: bool = False,
    prediction: Prediction | None = None,
) -> SyncReport:
    """Write a finalized precision into config objects, all or nothing.

    Args:
        configs: Owner name -> config object. None: the run has no such config.
        on_conflict: A policy of `CONFLICT_POLICIES`.
        is_last: Whether the run begins after this sync.
        prediction: A prediction of this run. Its rows are used if they were made for this precision
            and these values of the owners.

    Raises:
        PrecisionTypeError: An object is not a config, or is the config of another owner name.
        SyncConflictError: The policy is "error", and a set value differs from the precision.
        SyncCheckError: Megatron's validation or a rule refuses the result, or an attribute cannot
            be set.
    """
    _require_policy(on_conflict)
    owners = {
        owner_name: Owner(owner_name, config)
        for owner_name, config in configs.items()
        if config is not None
    }
    refuse_non_owners(owners.values())
    owner_values = {owner_name: owner.read() for owner_name, owner in owners.items()}
    planned = _get_predicted_rows(prediction, precision, owner_values)
    if planned is None:
        planned = plan_sync(
            precision,
            list(owner_values.values()),
            keep_owner_values=on_conflict == "keep",
            is_last=is_last,
        )
    rows = [_convert_row_values(row, owners[row.owner]) for row in planned]
    name = get_recipe_name(precision) or "mixed_precision"
    if on_conflict == "error":
        _refuse_conflicts(name, rows)
    trial = validate_on_copies(owners, rows, is_last=is_last)
    scheme = get_scheme_after_sync(precision, owner_values.values())
    findings = check_sync_rules(precision, owner_values, trial.rows, scheme=scheme, is_last=is_last)
    _refuse_errors(name, trial.findings, findings, is_last=is_last)
    apply_values(owners, trial.values)
    _disable_bf16_reduction(precision, owners.get("model"))
    return SyncReport(
        precision=format_label(precision),
        rows=(*trial.rows, *_make_process_rows(precision)),
        findings=(*trial.findings, *findings),
        megatron_version=get_megatron_version(),
    )


def _get_predicted_rows(
    prediction: Prediction | None,
    precision: PrecisionConfig,
    owner_values: Mapping[str, OwnerValues],
) -> Sequence[SyncRow] | None:
    """Return the rows of a prediction that was made for this precision and these owners.

    Args:
        prediction: The prediction that a check read. None: there was no check.
        precision: The precision that is written.
        owner_values: Owner name -> the values of the owner now.

    Returns:
        The rows. None if the plan has to be made: there is no prediction, or it was made for other
        values. A check predicts the configs of the target's megatron-core, or configs with every
        known field if the target states no release. The installed release may have other fields.
    """
    if prediction is None:
        return None
    predicted_values = {values.name: values for values in prediction.owner_values}
    if prediction.precision is precision and predicted_values == owner_values:
        return prediction.rows
    log.info(
        "The sync is planned again: the check read other values or fields than these configs have, "
        "as for a target that does not state the installed megatron-core."
    )
    return None


def _refuse_errors(
    name: str, of_megatron: Iterable[Finding], of_rules: Iterable[RuleFinding], *, is_last: bool
) -> None:
    """Raise a SyncCheckError with the errors that refuse the sync."""
    refusing_reactions = ["refused"]
    if is_last:
        refusing_reactions.append("last")
    fatal = [finding for finding in of_megatron if finding.severity == "error"]
    for finding in of_rules:
        if finding.severity == "error" and RULES_BY_ID[finding.id].sync in refusing_reactions:
            fatal.append(finding)
    if fatal:
        headline = f"The recipe {name!r} cannot be written into these configs; nothing was changed:"
        raise SyncCheckError(headline, fatal)


def _require_policy(policy: str) -> None:
    """Refuse a policy that is not in `CONFLICT_POLICIES`."""
    if policy in CONFLICT_POLICIES:
        return
    matches = close_matches(str(policy), CONFLICT_POLICIES)
    if policy == "raise":
        matches = ["error"]
    rule = f"must be one of {', '.join(CONFLICT_POLICIES)}"
    raise UnknownPolicyError.of("on_conflict", rule, policy, did_you_mean(matches), matches)


def _convert_row_values(row: SyncRow, owner: Owner) -> SyncRow:
    """Return a row of the plan with the old and the new value in the types of the object.

    A plan holds normalised values, for example tokens instead of dtypes.
    """
    if row.verdict == "absent":
        return row
    old = owner.value(row.attribute)
    default = get_class_defaults(owner.megatron_class).get(row.attribute, ABSENT)
    for value in (old, owner.value_before_sync(row.attribute), default):
        if is_same_value(normalise_value(value), row.new):
            if old is row.old and value is row.new:
                return row
            return replace(row, old=old, new=value)
    return replace(row, old=old, new=_convert_new_value(row, owner))


def _convert_new_value(row: SyncRow, owner: Owner) -> Any:
    """Return the new value of a row in the type that the owner's attribute has."""
    new = row.new
    if row.field == "modules" and owner.is_megatron and new is not None:
        kind = find_annotated_class(owner.megatron_class, row.attribute)
        if kind is not None:
            return build_recipe_object(kind, new, owner.config)
    elif row.field in FIELDS and FIELDS[row.field].kind == "dtype" and isinstance(new, str):
        return get_torch_dtype(new)
    return new


def _disable_bf16_reduction(precision: PrecisionConfig, model: Owner | None) -> None:
    """Set the process-wide switch of torch that Megatron sets when a model config is constructed.

    The sync writes into a config that exists already, so Megatron's `__post_init__` does not run
    again. Megatron sets the switch only in BF16, and not before `finalize` for a config of
    Megatron Bridge.
    """
    is_made = model is not None and model.is_megatron and not model.is_deferred
    if (
        is_made
        and precision.bf16
        and is_stated(precision, BF16_REDUCTION_FIELD)
        and get_field_value(precision, BF16_REDUCTION_FIELD)
    ):
        # The caller has imported torch for Megatron's config. `bridge.sync` does not import it.
        sys.modules["torch"].backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def get_megatron_version() -> str:
    """Return the version of the megatron-core that is installed or on the path, or "unknown"."""
    return get_installed_text("mcore") or "unknown"


def _refuse_conflicts(name: str, rows: list[SyncRow]) -> None:
    """Raise a SyncConflictError with the owners' values that the recipe would replace."""
    conflicts = [_make_conflict_finding(row) for row in rows if row.verdict == "override"]
    if conflicts:
        raise SyncConflictError(
            f"The recipe {name!r} and the configs disagree; nothing was changed:", conflicts
        )


def _make_conflict_finding(row: SyncRow) -> Finding:
    """Return the finding about an owner's value that differs from the recipe's."""
    decider = DECIDER_NOUNS.get(row.by.name, row.by.name)
    if row.by.kind == "mode":
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


def _make_process_rows(precision: PrecisionConfig) -> list[SyncRow]:
    """Return the row of the TF32 switch of the process, which is set when the run starts."""
    if precision.tf32 is None:
        return []
    matmul_precision = "highest"
    if precision.tf32:
        matmul_precision = "high"
    row = SyncRow(
        owner="process",
        attribute="float32_matmul_precision",
        field="tf32",
        old=None,
        new=matmul_precision,
        by=Decider("source", get_source(precision, "tf32")),
        why="written by torch.set_float32_matmul_precision when the run starts",
    )
    return [row]


def check_sync_rules(
    precision: PrecisionConfig | None,
    owner_values: Mapping[str, OwnerValues],
    rows: Sequence[SyncRow],
    *,
    scheme: str | None = None,
    is_last: bool = False,
) -> list[RuleFinding]:
    """Return the findings of the rules about the values of the owners after a sync.

    Args:
        precision: The precision. None: the owners keep their settings.
        owner_values: Owner name -> the values of the owner before the sync.
        rows: The plan.
        scheme: The scaling scheme after the sync.
        is_last: Whether the run begins after this sync.
    """
    values_after = _compute_values_after(precision, owner_values, rows)
    context = RuleContext(
        precision,
        views={owner_name: AttributeView(values) for owner_name, values in values_after.items()},
        present=frozenset(owner_values),
        rows=rows,
        scheme=scheme,
        target=Target(mcore=get_installed_version("mcore"), te=get_installed_version("te")),
        is_last=is_last,
    )
    return evaluate_rules(_SYNC_RULES, context)


def _compute_values_after(
    precision: PrecisionConfig | None,
    owner_values: Mapping[str, OwnerValues],
    rows: Sequence[SyncRow],
) -> dict[str, dict[str, Any]]:
    """Return owner name -> field -> value after the sync.

    A missing owner has the values of the precision, and Megatron's defaults for its other fields.
    """
    precision_values: Mapping[str, Any] = {}
    if precision is not None:
        precision_values = get_effective_values(precision)
    values: dict[str, dict[str, Any]] = {}
    for owner_name in PRECISION_OWNERS:
        if owner_name in owner_values:
            values[owner_name] = owner_values[owner_name].section.stated_or_none
        else:
            values[owner_name] = {**OWNER_DEFAULTS[owner_name], **precision_values}
    for row in rows:
        if row.owner in values and row.verdict != "absent":
            values[row.owner][row.attribute] = normalise_value(row.new)
    return values


def apply_values(owners: Mapping[str, Owner], values: Mapping[str, Mapping[str, Any]]) -> None:
    """Write values into the owners and record them. After an error the owners are restored.

    Args:
        owners: Owner name -> the owner.
        values: Owner name -> attribute -> the value.

    Raises:
        SyncCheckError: An attribute cannot be set. The error also names each value that could not
            be restored.
    """
    states = {}
    for owner_name, owner in owners.items():
        if hasattr(owner.config, "__dict__"):
            states[owner_name] = dict(vars(owner.config))
    writes: list[_AttributeWrite] = []
    try:
        for owner_name, owner in owners.items():
            values_before = {}
            for attribute in values[owner_name]:
                values_before[attribute] = owner.value_before_sync(attribute)
            for attribute, value in values[owner_name].items():
                writes.append(_AttributeWrite(owner, attribute, owner.value(attribute)))
                setattr(owner.config, attribute, value)
            owner.remember(values[owner_name], values_before)
    except Exception as error:
        not_restored = _restore_owners(owners, states, writes)
        refused = writes[-1]
        finding = Finding(
            path=refused.path,
            rule=f"cannot be set ({_format_error(error)})",
            value=values[refused.owner.name][refused.attribute],
            remedy=f"Make it writable, or give another object as {refused.owner.name}.",
        )
        headline = "The recipe cannot be written into these configs; nothing was changed:"
        if not_restored:
            headline = "The recipe cannot be written, and these configs are not as they were:"
        raise SyncCheckError(headline, [finding, *not_restored]) from error


class _AttributeWrite(NamedTuple):
    """An attribute that was written, or that could not be set."""

    owner: Owner
    attribute: str
    value_before: Any

    @property
    def path(self) -> str:
        """The path of the attribute: ``owner.attribute``."""
        return f"{self.owner.name}.{self.attribute}"


def _restore_owners(
    owners: Mapping[str, Owner],
    states: Mapping[str, Mapping[str, Any]],
    writes: Sequence[_AttributeWrite],
) -> list[Finding]:
    """Restore the values of every owner, and return a finding for each value that stays changed.

    Args:
        owners: Owner name -> the owner.
        states: Owner name -> the `__dict__` of the object before the first write.
        writes: The writes in order. The last one was refused.
    """
    not_restored = []
    for write in reversed(writes):
        if write.attribute in states.get(write.owner.name, ()):
            continue  # the whole `__dict__` is restored below
        # The attribute is a property or a slot.
        try:
            setattr(write.owner.config, write.attribute, write.value_before)
        except Exception as error:  # noqa: BLE001  the next attributes are restored all the same
            if write is writes[-1]:
                continue  # it refused the new value, so that it still has the old value
            finding = Finding(
                path=write.path,
                rule=f"was changed and cannot be restored ({_format_error(error)})",
                value=to_plain_data(write.owner.value(write.attribute)),
                remedy=f"Set it to {to_plain_data(write.value_before)!r}, or make the object again.",
            )
            not_restored.append(finding)
    for owner_name, state in states.items():
        attributes = vars(owners[owner_name].config)
        attributes.clear()
        attributes.update(state)
    return not_restored


def _format_error(error: Exception) -> str:
    """Return the class and the message of an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
