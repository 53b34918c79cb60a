"""Writing to the owners: all or nothing."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from bridge.errors import Finding, SyncCheckError

if TYPE_CHECKING:
    from bridge.sync.owner import Owner

__all__ = ["apply"]


def apply(owners: list[Owner], values: dict[int, dict[str, Any]]) -> None:
    """Write `values` (by identity of the owner) and remember them; after an error every owner is as it was.

    Args:
        owners: Where to write.
        values: ``id(owner)`` -> attribute -> value.

    Raises:
        SyncCheckError: An owner refused a value; everything is undone.
    """
    before = [(owner, dict(vars(owner.target)) if hasattr(owner.target, "__dict__") else {}) for owner in owners]
    done: list[tuple[Owner, str, Any]] = []
    try:
        for owner in owners:
            own = {name: owner.own(name) for name in values[id(owner)]}
            for name, value in values[id(owner)].items():
                done.append((owner, name, owner.value(name)))
                setattr(owner.target, name, value)
            owner.remember(values[id(owner)], own)
    except Exception as error:
        _undo(before, done)
        owner, name, _ = done[-1]
        raise SyncCheckError(
            "The recipe cannot be written into these configs; nothing was changed:",
            [
                Finding(
                    path=f"{owner.role}.{name}",
                    rule=f"cannot be set ({type(error).__name__}: {' '.join(str(error).split())})",
                    value=values[id(owner)][name],
                    remedy=f"Make it writable, or give another object as {owner.role}.",
                )
            ],
        ) from error


def _undo(before: list[tuple[Owner, dict[str, Any]]], done: list[tuple[Owner, str, Any]]) -> None:
    states = {id(owner): state for owner, state in before}
    for owner, name, value in reversed(done):
        if name not in states[id(owner)]:  # a property or a slot
            with contextlib.suppress(Exception):  # the one that refused refuses again
                setattr(owner.target, name, value)
    for owner, state in before:
        if hasattr(owner.target, "__dict__"):
            vars(owner.target).clear()
            vars(owner.target).update(state)
