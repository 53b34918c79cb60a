"""What a rule about a sync may look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.errors import Finding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bridge.precision.config import PrecisionConfig
    from bridge.sync.owner import Owner
    from bridge.sync.report import SyncRow

__all__ = ["Situation"]


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A planned sync."""

    config: PrecisionConfig
    owners: Mapping[str, Owner]
    """By role, as they were before the sync."""
    rows: Mapping[tuple[str, str], SyncRow]
    """Role and attribute -> what becomes of it."""
    scheme: str | None
    """The scaling scheme of the run: the config's, or where that states none an owner's own."""
    version: tuple[int, ...] | None
    """Of megatron-core; None where it is unknown."""
    is_last: bool
    """The run begins after this sync."""

    def after(self, role: str, attribute: str) -> Any:
        """Return what an owner will hold; None where there is no such row."""
        row = self.rows.get((role, attribute))
        return row.new if row is not None and row.verdict != "absent" else None

    def stands_out(self, field: str) -> bool:
        """Return whether `field` was stated with another value than its default."""
        return self.config.is_stated(field) and getattr(self.config, field) != getattr(type(self.config), field)

    def inert(self, field: str, why: str, remedy: str, *, severity: str = "warning") -> Finding:
        """Return the finding that a stated field has no effect."""
        return Finding(
            path=f"mixed_precision.{field}",
            rule=f"has no effect: {why}",
            value=self.config.to_dict(full=True)[field],
            where=self.config.source_of(field),
            remedy=remedy,
            severity=severity,
        )
