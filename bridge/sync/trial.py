"""The check before anything is written: the plan applied to copies, Megatron's own validation, our post-conditions."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge.errors import Finding
from bridge.sync.owner import Owner, same
from bridge.sync.report import SyncRow

if TYPE_CHECKING:
    from bridge.precision.config import MixedPrecisionConfig

__all__ = ["Trial", "try_on_copies"]

MIRRORED = (
    ("fp16", "model", "optimizer"),
    ("bf16", "model", "optimizer"),
    ("params_dtype", "model", "optimizer"),
    ("fp8_recipe", "model", "optimizer"),
    ("reuse_grad_buf_for_mxfp8_param_ag", "optimizer", "ddp"),
)
"""Attribute and the two owners that must agree on it."""

RENAMED = (("fp8_param", "fp8_param_gather"), ("fp4_param", "fp4_param_gather"))
"""Names of one setting in the model and in the DDP config."""

DERIVED = (
    "autocast_dtype",
    "use_precision_aware_optimizer_no_fp8_or_ds_fp8",
    "store_param_remainders",
    "attention_softmax_in_fp32",
    "pipeline_dtype",
)
"""What Megatron computes once in `__post_init__` and what would be stale after a plain assignment."""


class Trial:
    """The outcome on copies: `rows` with what Megatron derived, `findings`, and the values each owner has to take."""

    def __init__(self, rows: list[SyncRow]) -> None:
        self.rows = rows
        self.findings: list[Finding] = []
        self.values: dict[int, dict[str, Any]] = {}


def try_on_copies(config: MixedPrecisionConfig, owners: list[Owner], rows: list[SyncRow]) -> Trial:
    """Apply `rows` to copies of the owners, let Megatron validate them, and check that they agree.

    Returns:
        The trial; findings of severity "error" mean that the plan must not be applied, "warning" that Megatron's
        validation refuses the owner as it was, too.
    """
    trial = Trial(list(rows))
    ends: dict[str, Owner] = {}
    for owner in owners:
        wanted = {row.attribute: row.new for row in rows if row.owner == owner.role and row.verdict != "absent"}
        values = {name: value for name, value in wanted.items() if not same(owner.value(name), value)}
        if owner.is_megatron:
            twin, finding = _validated_copy(owner, wanted)
            derived = _difference(owner.target, twin, wanted)
            trial.rows = _with_derived(trial.rows, owner, derived)
            values.update(derived)
            ends[owner.role] = Owner(owner.role, twin)
            if finding is not None:
                trial.findings.append(finding)
        trial.values[id(owner)] = values
    trial.findings.extend(_disagreements(config, ends))
    return trial


def _validated_copy(owner: Owner, values: dict[str, Any]) -> tuple[Any, Finding | None]:
    twin = copy.copy(owner.target)
    vars(twin).update(values)
    error = _post_init(twin)
    if error is None:
        return twin, None
    untouched = copy.copy(owner.target)
    vars(untouched).update({name: owner.own(name) for name in values})
    before = _post_init(untouched)
    was_so = before is not None and str(before) == str(error)
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, TypeError) and "Version" in reason:  # megatron-core 0.16 compares a version that is not there
        reason = "needs Transformer Engine, which is not installed here"
    finding = Finding(
        path=owner.role,
        rule=f"Megatron's own validation refuses it ({reason})",
        value=type(owner.target).__name__,
        where="as it was before the recipe, too" if was_so else "with the recipe's values",
        remedy="Change the setting it names, or choose another recipe.",
        severity="warning" if was_so else "error",
    )
    return twin, finding


def _post_init(twin: Any) -> Exception | None:
    """Run Megatron's validation again; its warnings were given when the object was made."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            twin.__post_init__()
    except Exception as error:  # noqa: BLE001  whatever Megatron raises is its answer
        return error
    return None


def _difference(target: Any, twin: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return what Megatron derived on the copy: precision attributes that neither the plan nor the owner had so."""
    return {
        name: vars(twin)[name]
        for name in DERIVED
        if name in vars(twin)
        and not (name in wanted and same(wanted[name], vars(twin)[name]))
        and not (name not in wanted and same(getattr(target, name, None), vars(twin)[name]))
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
        SyncRow(
            owner=owner.role,
            attribute=name,
            field=None,
            old=owner.value(name),
            new=derived[name],
            verdict="derive",
            by="Megatron",
            why=why,
        )
        for name in derived
        if name not in known
    )
    return changed


def _disagreements(config: MixedPrecisionConfig, ends: dict[str, Owner]) -> list[Finding]:
    """Return post-conditions that do not hold: one mode, and one answer from every owner of a setting."""
    found = [
        _mismatch(owner.role, "fp16 and bf16 cannot both be on", True)
        for owner in ends.values()
        if owner.value("fp16") is True and owner.value("bf16") is True
    ]
    pairs = [(name, one, name, two) for name, one, two in MIRRORED if name != "fp8_recipe" or config.fp8]
    pairs += [(mine, "model", theirs, "ddp") for mine, theirs in RENAMED]
    for mine, one, theirs, two in pairs:
        first, second = ends.get(one), ends.get(two)
        if first is None or second is None or not first.has(mine) or not second.has(theirs):
            continue
        if not same(first.value(mine), second.value(theirs)):
            rule = f"must equal {two}.{theirs}, which is {second.value(theirs)!r}"
            found.append(_mismatch(f"{one}.{mine}", rule, first.value(mine)))
    return found


def _mismatch(path: str, rule: str, value: Any) -> Finding:
    remedy = "Let the recipe override both, or give both owners the same value."
    return Finding(path=path, rule=rule, value=value, where="after the sync", remedy=remedy)
