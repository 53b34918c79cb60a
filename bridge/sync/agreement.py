"""Settings that two owners hold: one answer for both, from the recipe or from the owner that was given one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bridge.rules.pairs import PAIRS
from bridge.sync.owner import same

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bridge.precision.config import PrecisionConfig
    from bridge.sync.owner import Owner
    from bridge.sync.report import SyncRow

__all__ = ["one_answer", "scheme_of"]


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
    for pair in PAIRS:
        for place, other in ((pair.one, pair.two), (pair.two, pair.one)):
            if place not in at or other not in at:
                continue
            kept, row = rows[at[place]], rows[at[other]]
            # A row that was set from the config's default is open.
            is_open = row.by == "default" and row.verdict != "absent"
            if kept.verdict != "keep" or not is_open or same(kept.new, row.new):
                continue
            why = f"as {place[0]}.{place[1]}, which has a value of its own that the recipe does not state"
            verdict = "agree" if same(row.old, kept.new) else "derive"
            answered[at[other]] = replace(row, new=kept.new, verdict=verdict, by=place[0], why=why, replaces_own=False)
    return answered
