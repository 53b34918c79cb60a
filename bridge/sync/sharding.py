"""Settings of sharding that a precision leans on: the reused gradient buffer, and the distributed optimizer's switches.

The peer's runtime settles both before a run, not in `setup` (Megatron Bridge 0.6.2, training/config.py,
`_validate_and_apply_megatron_fsdp_configs` and `_validate_and_sync_distributed_optimizer_settings`): the buffer is not
reused under Megatron-FSDP, and a switch that is on in one of optimizer and DDP is on in both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bridge.errors import Finding
from bridge.sync.report import SyncRow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bridge.sync.owner import Owner

__all__ = ["BUFFER", "out_of_step", "sharding_rows", "under_fsdp", "without_reuse_under_fsdp"]

BUFFER = "reuse_grad_buf_for_mxfp8_param_ag"
SWITCHES = ("use_distributed_optimizer", "overlap_param_gather")
"""What the optimizer and DDP both have to know; on in one owner is meant for both."""


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
    return [
        SyncRow(
            owner=role,
            attribute=name,
            field=None,
            old=False,
            new=True,
            verdict="derive",
            by="ddp" if role == "optimizer" or under_fsdp(owners) else "optimizer",
            why=why,
        )
        for role, name, why in _off(owners)
    ]


def out_of_step(owners: Mapping[str, Owner], *, settled: bool) -> list[Finding]:
    """Return a finding for each switch that `sharding_rows` turns on, or would."""
    where = "turned on before the run" if settled else None
    return [
        Finding(
            path=f"{role}.{name}",
            rule=f"has to be on: {why}",
            value=False,
            where=where,
            remedy=f"Set {role}.{name}=True{'' if settled else ', as runtime_config_update does'}.",
            severity="warning",
        )
        for role, name, why in _off(owners)
    ]


def _off(owners: Mapping[str, Owner]) -> Iterator[tuple[str, str, str]]:
    pair = {role: owner for role, owner in owners.items() if role in ("optimizer", "ddp")}
    if len(pair) < 2:
        return
    for name in SWITCHES:
        on = [role for role, owner in pair.items() if owner.value(name) is True]
        needed = name == SWITCHES[0] and under_fsdp(owners)
        for role, owner in pair.items():
            if owner.value(name) is False and (on or needed):
                yield role, name, f"{on[0]}.{name} is" if on else "Megatron-FSDP always shards the optimizer"
