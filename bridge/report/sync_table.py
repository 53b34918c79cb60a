"""Sync report for people: every field of the plan, and the findings, as plain text for a file."""

from rich.console import Group

from bridge.precision.values import plain
from bridge.report.table import plain_text, table
from bridge.sync.report import SyncReport


def render_sync(report: SyncReport) -> str:
    """Return the report as plain text."""
    recipe = f"recipe {report.precision.partition(',')[0]}"
    rows = [
        {
            "field": row.path,
            "was": _value(row.old),
            "is": _value(row.new),
            "verdict": row.verdict,
            "by": "recipe" if row.by == recipe else row.by,
            "why": row.why,
        }
        for row in report.rows
    ]
    title = f"{report.precision} on megatron-core {report.megatron_version}"
    findings = (f"{finding.severity}: {finding}" for finding in report.findings)
    return plain_text(
        Group(*([table(rows, title=title, wraps=("why",))] if rows else []), *findings), width=160
    )


def _value(value: object) -> str:
    given = plain(value)
    return given if isinstance(given, str) else repr(given)
