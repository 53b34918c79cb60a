"""`SyncReport`: the result of a sync, with a row for each field of each owner, and the findings.

print(report)           # the summary, the changed and the kept fields, and the findings
report.row("model.fp8").new
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge.errors import Finding
from bridge.precision.coercion import to_plain_data
from bridge.rules.sync_row import SyncRow

OVERRIDE_RULE_ID = "PB123"
"""Id of the rule about a recipe that replaces a set value. A sync reports it as a row."""


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
        """Rows with the verdict "override": the recipe's value replaced a set value."""
        return tuple(row for row in self.rows if row.verdict == "override")

    @property
    def replaced(self) -> tuple[SyncRow, ...]:
        """Rows in which a set value was replaced, under any verdict.

        The rows contain the overrides, and the set values of a scheme that is off.
        """
        return tuple(row for row in self.rows if row.replaces)

    def row(self, path: str) -> SyncRow:
        """Return the row of ``owner.attribute``.

        Raises:
            KeyError: There is no such row.
        """
        return {row.path: row for row in self.rows}[path]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "precision": self.precision,
            "megatron_core": self.megatron_version,
            "rows": [_row_to_dict(row) for row in self.rows],
            "findings": [_finding_to_dict(finding) for finding in self.findings],
        }

    def __str__(self) -> str:
        """Return the summary, the changed and the kept fields, and the findings, one per line."""
        lines = [self.summary()]
        for row in self.rows:
            if row.changes or row.verdict == "keep":
                lines.append(f"  {row}")
        for finding in self.findings:
            lines.append(f"{finding.severity}: {finding}")
        return "\n".join(lines)

    def summary(self) -> str:
        """Return a sentence with the number of changed and kept fields of each owner."""
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
        """Log the summary, a warning for each replaced value, and each finding at its severity.

        A run that begins is logged in this way.

        Args:
            file: A file that lists every field. The first line names it.
            known: (id, path) of findings that were reported before and are left out. A replaced
                value has the id `OVERRIDE_RULE_ID`.
        """
        first = self.summary()
        if file is not None:
            first = f"{first} Each is in {file}"
        logger.info(first)
        for row in self.replaced:
            if (OVERRIDE_RULE_ID, row.path) not in known:
                logger.warning("%s", row)
        for finding in self.findings:
            if (finding.id, finding.path) not in known:
                level: int = getattr(logging, finding.severity.upper())
                logger.log(level, "%s", finding)

    def log_warnings(self, logger: logging.Logger) -> None:
        """Log a warning for each replaced value, each kept value and each finding.

        A sync by an interface of Megatron Bridge is logged in this way. Megatron Bridge logs each
        change with the root logger at the level DEBUG, so the changes go there too.
        """
        for row in self.replaced:
            logger.warning("%s", row)
        for row in self.rows:
            if row.verdict == "keep":
                logger.warning("%s", row)
        for finding in self.findings:
            logger.warning("%s", finding)
        for row in self.changes:
            logging.debug(f"Overwrote {row.path}: {row.old} -> {row.new}")


def _row_to_dict(row: SyncRow) -> dict[str, Any]:
    return {
        "owner": row.owner,
        "attribute": row.attribute,
        "field": row.field,
        "old": to_plain_data(row.old),
        "new": to_plain_data(row.new),
        "verdict": row.verdict,
        "by": row.by.name,
        "why": row.why,
    }


def _finding_to_dict(finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.id,
        "severity": finding.severity,
        "path": finding.path,
        "rule": finding.rule,
        "value": to_plain_data(finding.value),
        "where": finding.where,
        "remedy": finding.remedy,
    }
