"""Settings of sharding that a precision leans on: the reused gradient buffer, and the distributed optimizer's switches.

Megatron Bridge's runtime resolves both before a run, not in `setup` (0.6.2, training/config.py,
`_validate_and_apply_megatron_fsdp_configs` and `_validate_and_sync_distributed_optimizer_settings`): the buffer is not
reused under Megatron-FSDP, and a switch that is on in one of optimizer and DDP is on in both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bridge.rules.inert import BUFFER
from bridge.rules.pairs import off_switches
from bridge.sync.report import SyncRow

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bridge.sync.owner import Owner

__all__ = ["BUFFER", "sharding_rows", "under_fsdp", "without_reuse_under_fsdp"]


def under_fsdp(owners: Mapping[str, Owner]) -> bool:
    """Return whether Megatron-FSDP shards the run."""
    ddp = owners.get("ddp")
    return ddp is not None and ddp.value("use_megatron_fsdp") is True


def without_reuse_under_fsdp(rows: list[SyncRow], owners: Mapping[str, Owner]) -> list[SyncRow]:
    """Return the rows with the reuse of the gradient buffer off under Megatron-FSDP, which has no such buffer."""
    if not under_fsdp(owners):
        return rows
    return [_off_under_fsdp(row, owners[row.owner]) if row.attribute == BUFFER and row.new else row for row in rows]


def _off_under_fsdp(row: SyncRow, owner: Owner) -> SyncRow:
    verdict = "agree" if row.old is False else "neutralise"
    why = "Megatron-FSDP does not implement it"
    return replace(row, new=False, verdict=verdict, by="ddp", why=why, replaces_own=owner.is_own(BUFFER))


def sharding_rows(owners: Mapping[str, Owner]) -> list[SyncRow]:
    """Return a row for each switch that is off in one of optimizer and DDP and on in the other, or needed by FSDP."""
    if not {"optimizer", "ddp"} <= owners.keys():
        return []
    return [
        SyncRow.derived(
            (role, name), (False, True), by="ddp" if role == "optimizer" or under_fsdp(owners) else "optimizer", why=why
        )
        for role, name, why in off_switches(lambda role, name: owners[role].value(name))
    ]
