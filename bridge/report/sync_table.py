"""Sync report for people: every field of the plan, and the findings, as plain text for a file."""

from rich.console import Group

from bridge.report.table import Column, plain_text, table
from bridge.sync.report import SyncReport, plain

COLUMNS = ("field", "was", "is", "verdict", "by", Column(heading="why", wraps=True))


def render_sync(report: SyncReport) -> str:
    """Return the report as plain text."""
    recipe = f"recipe {report.precision.partition(',')[0]}"
    rows = [
        (
            f"{row.owner}.{row.attribute}",
            _value(row.old),
            _value(row.new),
            row.verdict,
            "recipe" if row.by == recipe else row.by,
            row.why,
        )
        for row in report.rows
    ]
    title = f"{report.precision} on megatron-core {report.megatron_version}"
    findings = (f"{finding.severity}: {finding}" for finding in report.findings)
    return plain_text(Group(*([table(COLUMNS, rows, title=title)] if rows else []), *findings), width=160)


def _value(value: object) -> str:
    given = plain(value)
    return given if isinstance(given, str) else repr(given)
