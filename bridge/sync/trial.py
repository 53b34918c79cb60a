"""`validate_on_copies`: a plan applied to copies of the owners, which Megatron validates.

Megatron validates a config in `__post_init__` alone, and computes values there that go stale on a
plain assignment. On a copy it gives its verdict and the derived values, in every release.
"""

import copy
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bridge.errors import Finding
from bridge.precision.coercion import to_plain_data
from bridge.rules.sync_row import SyncRow
from bridge.sync.owner import Owner, get_class_defaults, is_same_value

NO_TRANSFORMER_ENGINE = "needs Transformer Engine, which is not installed here"
"""A reason that lies in this machine and not in the config."""

FUSED_SWITCH = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"
"""Megatron's derived switch: the fused Adam of the precision-aware optimizer holds the masters."""
DERIVED_ATTRIBUTES = (
    "autocast_dtype",
    FUSED_SWITCH,
    "store_param_remainders",
    "attention_softmax_in_fp32",
    "pipeline_dtype",
)
"""Attributes that Megatron computes once in `__post_init__`, stale after a plain assignment."""
FUSED_MASTER_EFFECTS = {
    True: (
        "the fused Adam holds the masters: with param remainders 2 bytes a BF16 parameter, before 4"
    ),
    False: (
        "Megatron holds FP32 masters: "
        "4 bytes a parameter, before 2 of a BF16 one with param remainders"
    ),
}
"""New value of the switch -> the effect of the change, in words."""
OVERRULED_REMEDIES = {
    "attention_softmax_in_fp32": "Drop it, or set apply_query_key_layer_scaling=False."
}
"""Attribute of `DERIVED` -> the remedy where Megatron replaces a stated value of it."""


class Trial(NamedTuple):
    """A plan after the trial."""

    rows: list[SyncRow]
    """The plan with what Megatron derived, owner by owner."""
    findings: list[Finding]
    """Refusals of Megatron's validation, and stated values that it replaces."""
    values: dict[str, dict[str, Any]]
    """Role -> attribute -> the value that the owner has to take."""


def validate_on_copies(
    owners: Mapping[str, Owner], rows: list[SyncRow], *, is_last: bool = False
) -> Trial:
    """Apply a plan to copies of the owners and let Megatron validate them.

    A finding of severity "error" means that the plan must not be applied. A "warning" means that
    Megatron's validation refuses the owner as it was, too, or that it would refuse a model that is
    not complete yet.

    Args:
        owners: Role -> the owner.
        rows: The plan.
        is_last: The run begins after this sync: an owner that waits for `finalize` is judged as a
            finished config.
    """
    findings: list[Finding] = []
    values: dict[str, dict[str, Any]] = {}
    tried: list[SyncRow] = []
    for role, owner in owners.items():
        owner_rows = [row for row in rows if row.owner == role]
        wanted = {row.attribute: row.new for row in owner_rows if row.verdict != "absent"}
        values[role] = _select_changed_values(owner, wanted)
        if owner.is_megatron:
            twin, finding = _validate_copy(owner, wanted, is_last=is_last)
            derived = _collect_derived_values(owner, twin, wanted)
            findings += _find_overruled_values(owner_rows, derived)
            if finding is not None:
                findings.append(finding)
            owner_rows = _merge_derived_values(owner_rows, owner, derived)
            values[role].update(derived)
        tried += owner_rows
    return Trial(tried, findings, values)


def _select_changed_values(owner: Owner, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the owner does not hold yet."""
    return {name: new for name, new in wanted.items() if not is_same_value(owner.value(name), new)}


def _validate_copy(
    owner: Owner, values: dict[str, Any], *, is_last: bool
) -> tuple[Any, Finding | None]:
    """Return a copy with the values, and the finding where Megatron's validation refuses it."""
    twin = copy.copy(owner.target)
    vars(twin).update(values)
    error = _run_post_init(owner, twin)
    if error is None:
        return twin, None
    untouched = copy.copy(owner.target)
    vars(untouched).update({name: owner.own(name) for name in values})
    error_before = _run_post_init(owner, untouched)
    was_refused = error_before is not None and str(error_before) == str(error)
    if owner.is_deferred and owner.role == "model" and error_before is not None:
        return twin, None  # its layers and sizes may still change
    where = "with the recipe's values"
    if was_refused:
        where = "as it was before the recipe, too"
    finding = make_refusal_finding(
        owner.role,
        owner.target,
        error,
        remedy="Change the setting it names, or choose another recipe.",
        where=where,
        severity=_choose_severity(owner, error, was_refused=was_refused, is_last=is_last),
    )
    return twin, finding


def _choose_severity(owner: Owner, error: Exception, *, was_refused: bool, is_last: bool) -> str:
    """Return the severity of a refusal.

    A model that waits for `finalize` may still change, and another owner that waits is finalized
    right after the last sync.
    """
    if owner.is_deferred and owner.role == "model":
        return "warning"
    if owner.is_deferred and is_last and format_validation_error(error) != NO_TRANSFORMER_ENGINE:
        return "error"
    if was_refused:
        return "warning"
    return "error"


def make_refusal_finding(role: str, target: Any, error: Exception, **parts: Any) -> Finding:
    """Return the finding about an owner that Megatron's validation refuses."""
    rule = f"Megatron's own validation refuses it ({format_validation_error(error)})"
    return Finding(path=role, rule=rule, value=type(target).__name__, **parts)


def format_validation_error(error: Exception) -> str:
    """Return the reason of Megatron's validation in a line."""
    reason = " ".join(str(error).split()) or type(error).__name__
    # megatron-core 0.16 compares with a version that is not there.
    is_missing = isinstance(error, TypeError) and "Version" in reason
    if is_missing or "TransformerEngine, but not found" in reason:
        return NO_TRANSFORMER_ENGINE
    return reason


def _run_post_init(owner: Owner, twin: Any) -> Exception | None:
    """Run Megatron's validation on a copy and return its error; None where it accepts the copy.

    Its warnings are dropped: they came when the object was made. A switch of the process that it
    sets is put back.
    """
    torch: Any = sys.modules.get("torch")
    matmul: Any = None
    before: Any = None
    if torch is not None:
        matmul = torch.backends.cuda.matmul
        before = matmul.allow_bf16_reduced_precision_reduction
    validating = type(twin)
    if owner.is_deferred:
        validating = owner.defining
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            validating.__post_init__(twin)
    except Exception as error:  # noqa: BLE001  whatever Megatron raises is its answer
        return error
    finally:
        if matmul is not None:
            matmul.allow_bf16_reduced_precision_reduction = before
    return None


def _collect_derived_values(owner: Owner, twin: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the values that Megatron derived on the copy, where the plan or the owner has another value.

    Fields of an owner that waits for `finalize` are left to that: they depend on what may still be
    changed.
    """
    left_to_finalize: Mapping[str, Any] = {}
    if owner.is_deferred:
        left_to_finalize = get_class_defaults(owner.defining)
    derived = {}
    for name in DERIVED_ATTRIBUTES:
        if name not in vars(twin) or name in left_to_finalize:
            continue
        planned = wanted.get(name, getattr(owner.target, name, None))
        value = vars(twin)[name]
        if not is_same_value(planned, value):
            derived[name] = value
    return derived


def _merge_derived_values(
    rows: list[SyncRow], owner: Owner, derived: dict[str, Any]
) -> list[SyncRow]:
    """Return the rows of an owner with the values that Megatron derived."""
    by = "Megatron"
    row_of = {row.attribute: row for row in rows}
    for name, new in derived.items():
        why = "computed by Megatron's own __post_init__"
        if name == FUSED_SWITCH:
            why = FUSED_MASTER_EFFECTS[new is True]
        if name in row_of:
            row = row_of[name]
        else:
            # A config that waits for `finalize` has not computed it yet.
            old = getattr(owner.target, name, None)
            row = SyncRow(owner=owner.role, attribute=name, old=old, new=new, by=by, why=why)
        row_of[name] = replace(row, new=new, verdict="derive", by=by, why=why, is_stated=False)
    return list(row_of.values())


def _find_overruled_values(rows: Sequence[SyncRow], derived: Mapping[str, Any]) -> list[Finding]:
    """Return a warning for each stated value that Megatron replaces by a derived value."""
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
            where=row.by,
            remedy=remedy,
            severity="warning",
        )
        findings.append(finding)
    return findings
