"""Writing to the owners: all or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge.sync.owner import Owner

__all__ = ["apply"]


def apply(owners: list[Owner], values: dict[int, dict[str, Any]]) -> None:
    """Write `values` (by identity of the owner) and remember them; after an error every owner is as it was.

    Args:
        owners: Where to write.
        values: ``id(owner)`` -> attribute -> value.

    Raises:
        Exception: Whatever an owner's own attribute raises, once everything is undone.
    """
    before = [(owner, dict(vars(owner.target)) if hasattr(owner.target, "__dict__") else None) for owner in owners]
    done: list[tuple[Owner, str, Any]] = []
    try:
        for owner in owners:
            own = {name: owner.own(name) for name in values[id(owner)]}
            for name, value in values[id(owner)].items():
                done.append((owner, name, owner.value(name)))
                setattr(owner.target, name, value)
            owner.remember(values[id(owner)], own)
    except BaseException:
        for owner, name, value in reversed(done):
            if not hasattr(owner.target, "__dict__"):
                setattr(owner.target, name, value)
        for owner, state in before:
            if state is not None:
                vars(owner.target).clear()
                vars(owner.target).update(state)
        raise
