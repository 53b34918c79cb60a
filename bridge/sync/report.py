"""`SyncReport`: the result of a sync, with a row for each field of each owner, and the findings.

print(report)           # the summary, the changed and the kept fields, and the findings
report.row("model.fp8").new
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge.errors import Finding
from bridge.precision.coercion import to_plain_data
from bridge.rules.sync_row import SyncRow

OVERRIDE_RULE_ID = "PB123"
"""Id of the rule about a recipe that replaces an owner's own value; a sync reports it in its rows."""

_ROW_KEYS = ("owner", "attribute", "field", "old", "new", "verdict", "by", "why")
"""Attributes of a row in a report as plain data."""
_FINDING_KEYS = ("id", "severity", "path", "rule", "value", "where", "remedy")
"""Attributes of a finding there."""


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """The result of `synchronize`."""

    precision: str
    """Name of the recipe, or a description of the config."""
    rows: tuple[SyncRow, ...]
    findings: tuple[Finding, ...] = field(default=())
    """Fields without an attribute or an effect, and settings that will not work."""
    megatron_version: str = "unknown"

    @property
    def changes(self) -> tuple[SyncRow, ...]:
        """Rows in which the sync changed an owner's value."""
        return tuple(row for row in self.rows if row.changes)

    @property
    def overrides(self) -> tuple[SyncRow, ...]:
        """Rows in which an owner's own value was replaced."""
        return tuple(row for row in self.rows if row.verdict == "override")

    def row(self, path: str) -> SyncRow:
        """Return the row of ``owner.attribute``; KeyError where there is none."""
        return {row.path: row for row in self.rows}[path]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "precision": self.precision,
            "megatron_core": self.megatron_version,
            "rows": [_to_plain_mapping(row, _ROW_KEYS) for row in self.rows],
            "findings": [_to_plain_mapping(finding, _FINDING_KEYS) for finding in self.findings],
        }

    def __str__(self) -> str:
        """Return the changed fields, those that were kept, and the findings, one per line."""
        lines = [self.summary()]
        for row in self.rows:
            if row.changes or row.verdict == "keep":
                lines.append(f"  {row}")
        for finding in self.findings:
            lines.append(f"{finding.severity}: {finding}")
        return "\n".join(lines)

    def lines(self, known: Collection[tuple[str, str]] = ()) -> list[tuple[int, str]]:
        """Return (logging level, sentence) pairs: the summary, a warning for each override, and the findings.

        Args:
            known: (id, path) of findings that were reported before. An override has the id of rule
                PB123.
        """
        lines = [(logging.INFO, self.summary())]
        for row in self.rows:
            if row.replaces and (OVERRIDE_RULE_ID, row.path) not in known:
                lines.append((logging.WARNING, str(row)))
        for finding in self.findings:
            if (finding.id, finding.path) not in known:
                level: int = getattr(logging, finding.severity.upper())
                lines.append((level, str(finding)))
        return lines

    def log_overrides(self, logger: logging.Logger) -> None:
        """Log a warning for each owner's value that was replaced."""
        for row in self.rows:
            if row.replaces:
                logger.warning("%s", row)

    def log_all(self, logger: logging.Logger) -> None:
        """Log a warning for each replaced value, each kept value and each finding, where nobody reads the report."""
        self.log_overrides(logger)
        self.log_others(logger)

    def log_others(self, logger: logging.Logger) -> None:
        """Log what `log_all` logs beyond the replaced values.

        Each change is a debug line of the root logger, which is where Megatron Bridge logs it.
        """
        for row in self.rows:
            if row.verdict == "keep":
                logger.warning("%s", row)
        for finding in self.findings:
            logger.warning("%s", finding)
        for row in self.changes:
            logging.debug(f"Overwrote {row.path}: {row.old} -> {row.new}")

    def summary(self) -> str:
        """Return one sentence: how many fields of each owner were changed, and how many kept."""
        changed = Counter(row.owner for row in self.changes)
        noun = "fields"
        if changed.total() == 1:
            noun = "field"
        sentence = f"{self.precision}: {changed.total()} {noun} written"
        if changed:
            counts = [f"{owner} {count}" for owner, count in changed.items()]
            sentence += f" ({', '.join(counts)})"
        kept = sum(row.verdict == "keep" for row in self.rows)
        if kept:
            sentence += f", {kept} kept"
        return f"{sentence}."

    def log(
        self,
        logger: logging.Logger,
        *,
        file: Path | None = None,
        known: Collection[tuple[str, str]] = (),
    ) -> None:
        """Write `lines` to a logger.

        Args:
            logger: The logger.
            file: A file where every field is listed, which the first line names.
            known: As for `lines`.
        """
        (level, first), *others = self.lines(known)
        if file is not None:
            first = f"{first} Each is in {file}"
        logger.log(level, first)
        for level, sentence in others:
            logger.log(level, sentence)


def _to_plain_mapping(item: SyncRow | Finding, names: Iterable[str]) -> dict[str, Any]:
    return {name: to_plain_data(getattr(item, name)) for name in names}
