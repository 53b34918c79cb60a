"""The check before anything is written: the plan applied to copies, and Megatron's own validation."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

from bridge.errors import Finding
from bridge.sync.owner import Owner, same
from bridge.sync.report import SyncRow

__all__ = ["NO_TRANSFORMER_ENGINE", "Trial", "reason_of", "try_on_copies"]

NO_TRANSFORMER_ENGINE = "needs Transformer Engine, which is not installed here"
"""The one reason that lies in this machine and not in the config."""

DERIVED = (
    "autocast_dtype",
    "use_precision_aware_optimizer_no_fp8_or_ds_fp8",
    "store_param_remainders",
    "attention_softmax_in_fp32",
    "pipeline_dtype",
)
"""Attributes that Megatron computes once in `__post_init__`, stale after a plain assignment."""


class Trial:
    """The outcome on copies: `rows` with what Megatron derived, `findings`, and the values each owner has to take."""

    def __init__(self, rows: list[SyncRow]) -> None:
        self.rows = rows
        self.findings: list[Finding] = []
        self.values: dict[int, dict[str, Any]] = {}


def try_on_copies(owners: list[Owner], rows: list[SyncRow], *, is_last: bool = False) -> Trial:
    """Apply `rows` to copies of the owners and let Megatron validate them.

    Args:
        owners: Where the precision is going to be written.
        rows: The plan.
        is_last: The run begins after this sync, so that what waits for `finalize` is judged as what is made already.

    Returns:
        The trial; findings of severity "error" mean that the plan must not be applied, "warning" that Megatron's
        validation refuses the owner as it was, too, or that it would refuse a model that is not complete yet.
    """
    trial = Trial(list(rows))
    for owner in owners:
        wanted = {row.attribute: row.new for row in rows if row.owner == owner.role and row.verdict != "absent"}
        values = {name: value for name, value in wanted.items() if not same(owner.value(name), value)}
        if owner.is_megatron:
            twin, finding = _validated_copy(owner, wanted, is_last=is_last)
            derived = _difference(owner, twin, wanted)
            trial.rows = _with_derived(trial.rows, owner, derived)
            values.update(derived)
            if finding is not None:
                trial.findings.append(finding)
        trial.values[id(owner)] = values
    return trial


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
    reason = reason_of(error)
    severity = "warning" if was_so else "error"
    if owner.is_deferred and owner.role == "model":  # its layers and sizes may still change
        if before is not None:
            return twin, None
        severity = "warning"
    elif owner.is_deferred and is_last and reason != NO_TRANSFORMER_ENGINE:  # `finalize` is what is called next
        severity = "error"
    finding = Finding(
        path=owner.role,
        rule=f"Megatron's own validation refuses it ({reason})",
        value=type(owner.target).__name__,
        where="as it was before the recipe, too" if was_so else "with the recipe's values",
        remedy="Change the setting it names, or choose another recipe.",
        severity=severity,
    )
    return twin, finding


def reason_of(error: Exception) -> str:
    """Return what Megatron's validation says, in one line."""
    reason = " ".join(str(error).split()) or type(error).__name__
    # megatron-core 0.16 compares with a version that is not there.
    is_missing = isinstance(error, TypeError) and "Version" in reason
    return NO_TRANSFORMER_ENGINE if is_missing or "TransformerEngine, but not found" in reason else reason


def _post_init(owner: Owner, twin: Any) -> Exception | None:
    """Run Megatron's validation on a copy; its warnings were given when the object was made."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if owner.is_deferred:
                owner.defining.__post_init__(twin)
            else:
                twin.__post_init__()
    except Exception as error:  # noqa: BLE001  whatever Megatron raises is its answer
        return error
    return None


def _difference(owner: Owner, twin: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return what Megatron derived on the copy: precision attributes that neither the plan nor the owner had so.

    Fields of an owner that waits for `finalize` are left to that: they depend on what may still be changed.
    """
    return {
        name: vars(twin)[name]
        for name in DERIVED
        if name in vars(twin)
        and not (owner.is_deferred and name in owner.defaults)
        and not (name in wanted and same(wanted[name], vars(twin)[name]))
        and not (name not in wanted and same(getattr(owner.target, name, None), vars(twin)[name]))
    }


def _with_derived(rows: list[SyncRow], owner: Owner, derived: dict[str, Any]) -> list[SyncRow]:
    why = "computed by Megatron's own __post_init__"
    known = {row.attribute for row in rows if row.owner == owner.role}
    changed = [
        replace(row, new=derived[row.attribute], verdict="derive", by="Megatron", why=why)
        if row.owner == owner.role and row.attribute in derived
        else row
        for row in rows
    ]
    changed.extend(
        SyncRow.derived((owner.role, name), (owner.value(name), value), by="Megatron", why=why)
        for name, value in derived.items()
        if name not in known
    )
    return changed
