"""`validate_on_copies`: a plan applied to copies of the owners, which Megatron validates.

Megatron validates a config only in `__post_init__`. It also computes values there, which become
stale when a field is assigned later. So the plan is applied to a copy, and `__post_init__` of the
installed release is run on that copy.
"""

import copy
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bridge.errors import Finding
from bridge.precision.coercion import to_plain_data
from bridge.precision.owners import ConfigObject
from bridge.rules.sync_row import MEGATRON, SyncRow
from bridge.sync.owner import Owner, get_class_defaults, is_same_value

NO_TRANSFORMER_ENGINE = "needs Transformer Engine, which is not installed here"
"""The reason for a refusal that this machine causes, and not the config."""

FUSED_SWITCH = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"
"""Megatron's derived switch: the fused Adam of the precision-aware optimizer holds the masters."""
DERIVED_ATTRIBUTES = (
    "autocast_dtype",
    FUSED_SWITCH,
    "store_param_remainders",
    "attention_softmax_in_fp32",
    "pipeline_dtype",
)
"""Attributes that Megatron computes in `__post_init__`, and that become stale on an assignment."""
FUSED_MASTER_EFFECTS = {
    True: (
        "the fused Adam holds the masters: with param remainders 2 bytes a BF16 parameter, before 4"
    ),
    False: (
        "Megatron holds FP32 masters: "
        "4 bytes a parameter, before 2 of a BF16 one with param remainders"
    ),
}
"""New value of `FUSED_SWITCH` -> the effect of the change."""
OVERRULED_REMEDIES = {
    "attention_softmax_in_fp32": "Drop it, or set apply_query_key_layer_scaling=False."
}
"""Attribute of `DERIVED_ATTRIBUTES` -> the remedy if Megatron replaces a stated value of it."""


class Trial(NamedTuple):
    """The result of a trial of a plan."""

    rows: list[SyncRow]
    """The plan with the values that Megatron derived, owner by owner."""
    findings: list[Finding]
    """Refusals by Megatron's validation, and stated values that Megatron replaces."""
    values: dict[str, dict[str, Any]]
    """Owner name -> attribute -> the value that is to be written."""


def validate_on_copies(
    owners: Mapping[str, Owner], rows: list[SyncRow], *, is_last: bool = False
) -> Trial:
    """Apply a plan to copies of the owners and let Megatron validate them.

    A plan with a finding of severity "error" must not be applied. A "warning" means that Megatron's
    validation also refuses the owner without the plan, or that it refuses a model config whose
    other fields may still change.

    Args:
        owners: Owner name -> the owner.
        rows: The plan.
        is_last: Whether the run begins after this sync. If so, an owner whose `__post_init__` is
            deferred to `finalize` is judged as a finished config.
    """
    findings: list[Finding] = []
    values: dict[str, dict[str, Any]] = {}
    tried: list[SyncRow] = []
    for owner_name, owner in owners.items():
        owner_rows = [row for row in rows if row.owner == owner_name]
        wanted = {row.attribute: row.new for row in owner_rows if row.verdict != "absent"}
        values[owner_name] = _select_changed_values(owner, wanted)
        if owner.is_megatron:
            twin, finding = _validate_copy(owner, wanted, is_last=is_last)
            derived = _collect_derived_values(owner, twin, wanted)
            findings += _find_overruled_values(owner_rows, derived)
            if finding is not None:
                findings.append(finding)
            owner_rows = _merge_derived_values(owner_rows, owner, derived)
            values[owner_name].update(derived)
        tried += owner_rows
    return Trial(tried, findings, values)


def _select_changed_values(owner: Owner, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the planned values that differ from the values of the owner."""
    return {name: new for name, new in wanted.items() if not is_same_value(owner.value(name), new)}


def _validate_copy(
    owner: Owner, values: dict[str, Any], *, is_last: bool
) -> tuple[ConfigObject, Finding | None]:
    """Return a copy with the values, and a finding if Megatron's validation refuses the copy."""
    twin = copy.copy(owner.config)
    vars(twin).update(values)
    error = _run_post_init(owner, twin)
    if error is None:
        return twin, None
    twin_before_sync = copy.copy(owner.config)
    vars(twin_before_sync).update({name: owner.value_before_sync(name) for name in values})
    error_before = _run_post_init(owner, twin_before_sync)
    was_refused = error_before is not None and str(error_before) == str(error)
    if owner.is_deferred and owner.name == "model" and error_before is not None:
        return twin, None  # not complete yet: its layers and sizes are set before `finalize`
    where = "with the recipe's values"
    if was_refused:
        where = "as it was before the recipe, too"
    finding = make_refusal_finding(
        owner.name,
        owner.config,
        error,
        remedy="Change the setting it names, or choose another recipe.",
        where=where,
        severity=_choose_severity(owner, error, was_refused=was_refused, is_last=is_last),
    )
    return twin, finding


def _choose_severity(owner: Owner, error: Exception, *, was_refused: bool, is_last: bool) -> str:
    """Return the severity of a refusal.

    A model config before `finalize` may still change, so its refusal is a warning. Other configs
    are finalized right after the last sync, so their refusal is an error then.
    """
    if owner.is_deferred and owner.name == "model":
        return "warning"
    if owner.is_deferred and is_last and format_validation_error(error) != NO_TRANSFORMER_ENGINE:
        return "error"
    if was_refused:
        return "warning"
    return "error"


def make_refusal_finding(
    owner_name: str,
    config: ConfigObject,
    error: Exception,
    *,
    remedy: str,
    where: str | None = None,
    severity: str = "error",
) -> Finding:
    """Return the finding about an owner that Megatron's validation refuses."""
    rule = f"Megatron's own validation refuses it ({format_validation_error(error)})"
    return Finding(
        path=owner_name,
        rule=rule,
        value=type(config).__name__,
        where=where,
        remedy=remedy,
        severity=severity,
    )


def format_validation_error(error: Exception) -> str:
    """Return the message of Megatron's validation in one line."""
    reason = " ".join(str(error).split()) or type(error).__name__
    # Without Transformer Engine megatron-core 0.16 compares None with a version: a TypeError.
    is_missing = isinstance(error, TypeError) and "Version" in reason
    if is_missing or "TransformerEngine, but not found" in reason:
        return NO_TRANSFORMER_ENGINE
    return reason


def _run_post_init(owner: Owner, twin: ConfigObject) -> Exception | None:
    """Run Megatron's validation on a copy, and return its error or None.

    Its warnings are dropped, because Megatron issued them when the object was made.
    Validation sets a process-wide switch of torch, which is restored.
    """
    # Megatron's classes import torch. Without torch there is no switch to restore.
    torch: Any = sys.modules.get("torch")
    matmul: Any = None
    switch_before: Any = None
    if torch is not None:
        matmul = torch.backends.cuda.matmul
        switch_before = matmul.allow_bf16_reduced_precision_reduction
    validating_class: Any = type(twin)
    if owner.is_deferred:
        # The `__post_init__` of the subclass does nothing before `finalize`.
        validating_class = owner.megatron_class
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            validating_class.__post_init__(twin)
    except Exception as error:  # noqa: BLE001  every exception of Megatron is a refusal
        return error
    finally:
        if matmul is not None:
            matmul.allow_bf16_reduced_precision_reduction = switch_before
    return None


def _collect_derived_values(
    owner: Owner, twin: ConfigObject, wanted: dict[str, Any]
) -> dict[str, Any]:
    """Return the values that Megatron derived on the copy and that differ from the planned values.

    Before `finalize` the derived fields of a deferred config are left out. They depend on fields
    that may still change.
    """
    left_to_finalize: Mapping[str, Any] = {}
    if owner.is_deferred:
        left_to_finalize = get_class_defaults(owner.megatron_class)
    derived = {}
    for name in DERIVED_ATTRIBUTES:
        if name not in vars(twin) or name in left_to_finalize:
            continue
        planned = wanted.get(name, getattr(owner.config, name, None))
        value = vars(twin)[name]
        if not is_same_value(planned, value):
            derived[name] = value
    return derived


def _merge_derived_values(
    rows: list[SyncRow], owner: Owner, derived: dict[str, Any]
) -> list[SyncRow]:
    """Return the rows of an owner with the values that Megatron derived."""
    row_by_attribute = {row.attribute: row for row in rows}
    for name, new in derived.items():
        why = "computed by Megatron's own __post_init__"
        if name == FUSED_SWITCH:
            why = FUSED_MASTER_EFFECTS[new is True]
        if name in row_by_attribute:
            row = row_by_attribute[name]
        else:
            # A config before `finalize` does not have the attribute yet.
            old = getattr(owner.config, name, None)
            row = SyncRow(owner=owner.name, attribute=name, old=old, new=new, by=MEGATRON, why=why)
        row_by_attribute[name] = replace(
            row, new=new, verdict="derive", by=MEGATRON, why=why, is_stated=False
        )
    return list(row_by_attribute.values())


def _find_overruled_values(rows: Sequence[SyncRow], derived: Mapping[str, Any]) -> list[Finding]:
    """Return a warning for each stated value that Megatron replaces with a derived value."""
    findings = []
    for row in rows:
        if row.attribute not in derived or not row.is_stated or row.verdict == "absent":
            continue
        remedy = OVERRULED_REMEDIES.get(
            row.attribute, "Drop it, or change the setting that it follows from."
        )
        finding = Finding(
            path=row.path,
            rule=f"Megatron's own __post_init__ sets it to {to_plain_data(derived[row.attribute])!r}",
            value=to_plain_data(row.new),
            where=row.by.name,
            remedy=remedy,
            severity="warning",
        )
        findings.append(finding)
    return findings
