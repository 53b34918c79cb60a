"""Settings that two owners hold: one answer for both, from the recipe or from the owner that was given one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bridge.errors import Finding
from bridge.sync.owner import same

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bridge.precision.config import PrecisionConfig
    from bridge.sync.owner import Owner
    from bridge.sync.report import SyncRow

__all__ = ["disagreements", "one_answer", "scheme_of"]


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """One setting with two homes."""

    one: tuple[str, str]
    """Role and attribute."""
    two: tuple[str, str]


MIRRORED = (
    ("fp16", "model", "optimizer"),
    ("bf16", "model", "optimizer"),
    ("params_dtype", "model", "optimizer"),
    ("fp8_recipe", "model", "optimizer"),
    ("reuse_grad_buf_for_mxfp8_param_ag", "optimizer", "ddp"),
)
"""Attribute and the two owners that must agree on it."""

RENAMED = (
    (("model", "fp8_param"), ("ddp", "fp8_param_gather")),
    (("model", "fp4_param"), ("ddp", "fp4_param_gather")),
    (("model", "enable_autocast"), ("model", "autocast_enabled")),
)
"""Names of one setting in two owners, or in one."""

SHARED = (
    *(_Shared(one=(first, name), two=(second, name)) for name, first, second in MIRRORED),
    *(_Shared(one=one, two=two) for one, two in RENAMED),
)


def scheme_of(config: PrecisionConfig, owners: Iterable[Owner]) -> str | None:
    """Return the scaling scheme the run will have: the stated one, else an owner's own, else the config's default.

    Args:
        config: The precision.
        owners: Where it is going to be written.
    """
    field = "fp8_recipe" if config.fp8 else "fp4_recipe"
    if config.scheme is not None and not config.is_stated(field):
        for owner in owners:
            if owner.has(field) and owner.is_own(field) and owner.own(field) is not None:
                own = owner.own(field)
                return str(getattr(own, "value", own))
    return config.scheme


def one_answer(rows: list[SyncRow]) -> list[SyncRow]:
    """Return the rows with one owner's own value given to the other owner of the setting, where the recipe has none.

    Where both owners have a value of their own, both stay: if they differ, `disagreements` names them.
    """
    answered = list(rows)
    at = {(row.owner, row.attribute): index for index, row in enumerate(rows)}
    for shared in SHARED:
        for place, other in ((shared.one, shared.two), (shared.two, shared.one)):
            if place not in at or other not in at:
                continue
            kept, row = rows[at[place]], rows[at[other]]
            # What was set from the config's default is what nobody has an opinion on.
            is_open = row.by == "default" and row.verdict != "absent"
            if kept.verdict != "keep" or not is_open or same(kept.new, row.new):
                continue
            why = f"as {place[0]}.{place[1]}, which has a value of its own that the recipe does not state"
            verdict = "agree" if same(row.old, kept.new) else "derive"
            answered[at[other]] = replace(row, new=kept.new, verdict=verdict, by=place[0], why=why, replaces_own=False)
    return answered


def disagreements(config: PrecisionConfig, ends: Mapping[str, Owner]) -> list[Finding]:
    """Return post-conditions that do not hold: one mode, and one answer from every owner of a setting.

    Args:
        config: The precision.
        ends: Role -> owner as it will be.
    """
    found = [
        _mismatch(owner.role, "fp16 and bf16 cannot both be on", True)
        for owner in ends.values()
        if owner.value("fp16") is True and owner.value("bf16") is True
    ]
    for shared in SHARED:
        (one, mine), (two, theirs) = shared.one, shared.two
        first, second = ends.get(one), ends.get(two)
        if one == two or (mine == "fp8_recipe" and not config.fp8):
            continue  # without FP8 the optimizer's is None and the model's is Megatron's default
        if first is None or second is None or not first.has(mine) or not second.has(theirs):
            continue
        if not same(first.value(mine), second.value(theirs)):
            rule = f"must equal {two}.{theirs}, which is {second.value(theirs)!r}"
            found.append(_mismatch(f"{one}.{mine}", rule, first.value(mine)))
    return found


def _mismatch(path: str, rule: str, value: object) -> Finding:
    remedy = "Let the recipe override both, or give both owners the same value."
    return Finding(path=path, rule=rule, value=value, where="after the sync", remedy=remedy)
