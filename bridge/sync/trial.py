"""A plan tried on copies of the owners: what Megatron derives from it, and whether its validation accepts it."""

import copy
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bridge.errors import Finding
from bridge.precision.values import plain
from bridge.rules.sync_row import SyncRow
from bridge.sync.owner import Owner, class_defaults, same

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


def try_on_copies(
    owners: Mapping[str, Owner], rows: list[SyncRow], *, is_last: bool = False
) -> Trial:
    """Apply `rows` to copies of the owners and let Megatron validate them.

    Findings of severity "error" mean that the plan must not be applied, "warning" that Megatron's
    validation refuses the owner as it was, too, or that it would refuse a model that is not
    complete yet. With `is_last` what waits for `finalize` is judged as what is made already.
    """
    findings: list[Finding] = []
    taken: dict[str, dict[str, Any]] = {}
    tried: list[SyncRow] = []
    for role, owner in owners.items():
        own = [row for row in rows if row.owner == role]
        wanted = {row.attribute: row.new for row in own if row.verdict != "absent"}
        taken[role] = {
            name: value for name, value in wanted.items() if not same(owner.value(name), value)
        }
        if owner.is_megatron:
            twin, finding = _validated_copy(owner, wanted, is_last=is_last)
            derived = _difference(owner, twin, wanted)
            findings += [*_overruled(own, derived), *([finding] if finding is not None else [])]
            own = _with_derived(own, owner, derived)
            taken[role] |= derived
        tried += own
    return Trial(tried, findings, taken)


def _validated_copy(
    owner: Owner, values: dict[str, Any], *, is_last: bool
) -> tuple[Any, Finding | None]:
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
    elif (
        owner.is_deferred and is_last and reason_of(error) != NO_TRANSFORMER_ENGINE
    ):  # `finalize` is called next
        severity = "error"
    where = "as it was before the recipe, too" if was_so else "with the recipe's values"
    remedy = "Change the setting it names, or choose another recipe."
    return twin, refusal(
        owner.role, owner.target, error, remedy=remedy, where=where, severity=severity
    )


def refusal(role: str, target: Any, error: Exception, **parts: Any) -> Finding:
    """Return the finding about an owner that Megatron's validation refuses."""
    rule = f"Megatron's own validation refuses it ({reason_of(error)})"
    return Finding(path=role, rule=rule, value=type(target).__name__, **parts)


def reason_of(error: Exception) -> str:
    """Return what Megatron's validation says, in one line."""
    reason = " ".join(str(error).split()) or type(error).__name__
    # megatron-core 0.16 compares with a version that is not there.
    is_missing = isinstance(error, TypeError) and "Version" in reason
    return (
        NO_TRANSFORMER_ENGINE
        if is_missing or "TransformerEngine, but not found" in reason
        else reason
    )


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

    Fields of an owner that waits for `finalize` are left to that: they
    depend on what may still be changed.
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
        old = getattr(
            owner.target, name, None
        )  # a config that waits for `finalize` has not computed it yet
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
            remedy=OVERRULED_BY.get(
                row.attribute, "Drop it, or change the setting that it follows from."
            ),
            severity="warning",
        )
        for row in rows
        if row.attribute in derived and row.why == "stated" and row.verdict != "absent"
    ]
