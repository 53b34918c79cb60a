"""`SyncRow`: the value that a sync gives one field of one config, and the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from bridge.precision.coercion import to_plain_data
from bridge.precision.precision_config import MODE_SWITCHES

Verdict = Literal["override", "set", "derive", "neutralise", "keep", "agree", "absent"]
"""The effect of a sync on a value of an owner.

override: a value that was set in the owner is replaced. set: a default is replaced. derive: the
value follows from other values. neutralise: the field has no effect in this run and is reset.
keep: the value that was set in the owner stays. agree: the owner has the value already. absent:
the owner has no such attribute.
"""

DeciderKind = Literal["source", "mode", "default", "owner", "megatron"]
"""The kind of a decider.

source: a statement of the precision. mode: the mode of the precision. default: the default of the
precision config. owner: a value of an owner. megatron: Megatron's code.
"""


@dataclass(frozen=True, slots=True)
class Decider:
    """The decider of a row's new value."""

    kind: DeciderKind
    name: str
    """The name in reports: "recipe bf16_mixed", "command line", "mode", "model"."""
    setting: str | None = None
    """The setting that decides, if it is not the attribute of the same name in another owner."""

    def __str__(self) -> str:
        return self.name


MODE = Decider("mode", "mode")
CONFIG_DEFAULT = Decider("default", "default")
MEGATRON = Decider("megatron", "Megatron")
MEGATRON_DEFAULT = Decider("megatron", "Megatron's default")


@dataclass(frozen=True, kw_only=True)
class SyncRow:
    """The value of one attribute of one owner before and after a sync."""

    owner: str
    attribute: str
    field: str | None = None
    """The field of the precision config. None: Megatron derives the value from other settings."""
    old: Any
    new: Any
    verdict: Verdict = "derive"
    by: Decider
    """The decider of the new value."""
    why: str
    is_stated: bool = False
    """Whether the precision states the new value."""
    replaces_set_value: bool = False
    """Whether the sync replaces a value that was set in the owner, not a class default."""
    since: str | None = None
    """The first megatron-core that has the attribute, if the installed version does not have it."""

    @property
    def path(self) -> str:
        """The path of the field: ``owner.attribute``."""
        return f"{self.owner}.{self.attribute}"

    @property
    def changes(self) -> bool:
        """Whether the sync gave the owner another value.

        A row of the process is not a change: its value is written when the run starts.
        """
        if self.verdict == "absent" or self.owner == "process":
            return False
        return repr(self.old) != repr(self.new)

    @property
    def replaces(self) -> bool:
        """Whether the sync replaced a value that was set in the owner."""
        return self.changes and (self.verdict == "override" or self.replaces_set_value)

    @property
    def can_be_kept(self) -> bool:
        """Whether ``on_conflict="keep"`` keeps the owner's value.

        The precision always decides the mode and the scheme.
        """
        fields_of_mode = (*MODE_SWITCHES, "fp8_recipe", "fp4_recipe")
        return self.by.kind != "mode" and self.field not in fields_of_mode

    def __str__(self) -> str:
        old, new = f"{to_plain_data(self.old)!r}", f"{to_plain_data(self.new)!r}"
        change = new
        if old != new:
            change = f"{old} -> {new}"
        reason = self.why
        if self.by.name != self.why:
            reason = f"{self.by}: {self.why}"
        return f"{self.path}: {change} ({self.verdict}, {reason})"
