"""What a sync did, or would do: one row per precision field and owner, and the findings beside them."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.precision.dtypes import dtype_token

if TYPE_CHECKING:
    from pathlib import Path

    from bridge.errors import Finding

__all__ = ["SyncReport", "SyncRow", "plain"]


@dataclass(frozen=True, kw_only=True)
class SyncRow:
    """One field of one owner."""

    owner: str
    """model, optimizer, ddp, train or process."""
    attribute: str
    """Its name there."""
    field: str | None
    """Field of the precision config behind it; None for what Megatron derives."""
    old: Any
    """Value before the sync."""
    new: Any
    """Value after it."""
    verdict: str
    """override: somebody's value was replaced. set: a default was replaced. derive: follows from others.
    neutralise: put out of action. keep: the owner's own value stays. agree: nothing to do. absent: no such thing."""
    by: str
    """Who decided: "recipe NAME", "command line", "default", "model", ..."""
    why: str
    """The reason, as a clause."""
    replaces_own: bool = False
    """Whether the value that is replaced is one that somebody had given the owner."""
    since: str | None = None
    """First megatron-core that has the attribute, where the installed one does not have it."""

    @property
    def changes(self) -> bool:
        """Whether the sync gave the owner another value. The process changes later, when the run starts."""
        return self.verdict != "absent" and self.owner != "process" and repr(self.old) != repr(self.new)


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """The result of `synchronize`."""

    precision: str
    """Name of the recipe, or a description of the config."""
    rows: tuple[SyncRow, ...]
    """Every precision field of every owner."""
    findings: tuple[Finding, ...] = field(default=())
    """What has no home or no effect, and what will not work."""
    megatron_version: str = "unknown"
    """Version of the installed megatron-core."""

    @property
    def changes(self) -> tuple[SyncRow, ...]:
        """Rows in which an owner's value is another one now."""
        return tuple(row for row in self.rows if row.changes)

    @property
    def overrides(self) -> tuple[SyncRow, ...]:
        """Rows in which somebody's own value was replaced."""
        return tuple(row for row in self.rows if row.verdict == "override")

    def row(self, path: str) -> SyncRow:
        """Return the row of ``owner.attribute``; KeyError where there is none."""
        for row in self.rows:
            if path == f"{row.owner}.{row.attribute}":
                return row
        raise KeyError(path)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "precision": self.precision,
            "megatron_core": self.megatron_version,
            "rows": [
                {
                    "owner": row.owner,
                    "attribute": row.attribute,
                    "field": row.field,
                    "old": plain(row.old),
                    "new": plain(row.new),
                    "verdict": row.verdict,
                    "by": row.by,
                    "why": row.why,
                }
                for row in self.rows
            ],
            "findings": [
                {
                    "severity": finding.severity,
                    "path": finding.path,
                    "rule": finding.rule,
                    "value": plain(finding.value),
                    "where": finding.where,
                    "remedy": finding.remedy,
                }
                for finding in self.findings
            ],
        }

    def lines(self) -> list[tuple[int, str]]:
        """Return (logging level, sentence) pairs: one INFO line that sums up, a warning per override, the findings."""
        lines = [(logging.INFO, self.summary())]
        for row in self.changes:
            if row.verdict == "override" or row.replaces_own:
                change = f"{plain(row.old)!r} -> {plain(row.new)!r}"
                why = f"({row.verdict}, {row.by}: {row.why})"
                lines.append((logging.WARNING, f"{row.owner}.{row.attribute}: {change} {why}"))
        levels = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO}
        return lines + [(levels[finding.severity], str(finding)) for finding in self.findings]

    def summary(self) -> str:
        """Return one sentence: how many fields of each owner were changed, and how many were kept."""
        changed = Counter(row.owner for row in self.changes)
        each = ", ".join(f"{owner} {count}" for owner, count in changed.items())
        kept = sum(row.verdict == "keep" for row in self.rows)
        noun = "field" if changed.total() == 1 else "fields"
        sentence = f"{self.precision}: {changed.total()} {noun} written" + (f" ({each})" if each else "")
        return f"{sentence}, {kept} kept." if kept else f"{sentence}."

    def log(self, logger: logging.Logger, *, file: Path | None = None) -> None:
        """Write `lines` to a logger.

        Args:
            logger: Where to.
            file: Where every field is listed; named in the first line.
        """
        (level, first), *others = self.lines()
        logger.log(level, first if file is None else f"{first} Each is in {file}")
        for level, sentence in others:
            logger.log(level, sentence)


def plain(value: Any) -> Any:
    """Return `value` as data that JSON can hold: dtypes as tokens, anything unknown as its repr."""
    if value is None or isinstance(value, bool | int | float | str):
        return getattr(value, "value", value) if isinstance(value, str) else value
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return dtype_token(value)
    return repr(value)
