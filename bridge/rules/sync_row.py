"""`SyncRow`: the value that a sync gives one field of one config, and the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from bridge.precision.coercion import to_plain_data
from bridge.precision.config import MODE_SWITCHES

Verdict = Literal["override", "set", "derive", "neutralise", "keep", "agree", "absent"]
"""The effect of a sync on a value of an owner.

override: a value that was set in the owner is replaced. set: a default is replaced. derive: the
value follows from other values. neutralise: the field has no effect in this run and is reset.
keep: the value that was set in the owner stays. agree: the owner has the value already. absent:
the owner has no such attribute.
"""


@dataclass(frozen=True, kw_only=True)
class SyncRow:
    """One field of one owner."""

    owner: str
    attribute: str
    field: str | None = None
    """Field of the precision config behind it; None for what Megatron derives."""
    old: Any
    new: Any
    verdict: Verdict = "derive"
    by: str
    """The source that decided: "recipe NAME", "command line", "default", "model", ..."""
    why: str
    is_stated: bool = False
    """Whether the new value is the one that the precision states."""
    replaces_own: bool = False
    """Whether the value that is replaced is an owner's own, not a class default."""
    since: str | None = None
    """First megatron-core that has the attribute, where the installed one does not have it."""

    @property
    def path(self) -> str:
        """The path of the field: ``owner.attribute``."""
        return f"{self.owner}.{self.attribute}"

    @property
    def changes(self) -> bool:
        """Whether the sync gave the owner another value; the process changes at the start."""
        if self.verdict == "absent" or self.owner == "process":
            return False
        return repr(self.old) != repr(self.new)

    @property
    def replaces(self) -> bool:
        """Whether the sync replaced a value of the owner's own."""
        return self.changes and (self.verdict == "override" or self.replaces_own)

    @property
    def can_be_kept(self) -> bool:
        """Whether ``on_conflict="keep"`` keeps the owner's value: no mode, no scheme."""
        return self.by != "mode" and self.field not in (*MODE_SWITCHES, "fp8_recipe", "fp4_recipe")

    def __str__(self) -> str:
        old, new = f"{to_plain_data(self.old)!r}", f"{to_plain_data(self.new)!r}"
        change = new
        if old != new:
            change = f"{old} -> {new}"
        reason = self.why
        if self.by != self.why:
            reason = f"{self.by}: {self.why}"
        return f"{self.path}: {change} ({self.verdict}, {reason})"
