"""Sync report for people: the fields that changed, those that were kept, and the findings."""

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.report.table import Column, plain_text, table
from bridge.sync.report import SyncReport, plain

STYLES = {
    "override": "yellow",
    "set": "green",
    "derive": "cyan",
    "neutralise": "magenta",
    "keep": "blue",
    "absent": "red",
    "agree": "dim",
}
COLUMNS = ("field", "was", "is", "verdict", "by", Column(heading="why", wraps=True))


def sync_table(report: SyncReport, *, every_row: bool = False) -> RenderableType:
    """Return the report as something rich can print."""
    listed = [row for row in report.rows if every_row or row.changes or row.verdict == "keep"]
    recipe = f"recipe {report.precision.partition(',')[0]}"
    rows = [
        (
            f"{row.owner}.{row.attribute}",
            _value(row.old),
            _value(row.new),
            Text(row.verdict, style=STYLES[row.verdict]),
            "recipe" if row.by == recipe else row.by,
            row.why,
        )
        for row in listed
    ]
    title = f"{report.precision} on megatron-core {report.megatron_version}"
    parts: list[RenderableType] = [table(COLUMNS, rows, title=title)] if rows else []
    if len(report.rows) > len(rows):
        parts.append(Text(f"  {len(report.rows) - len(rows)} more fields are as they were.", style="dim"))
    parts.extend(
        Text(f"{finding.severity}: {finding}", style="red" if finding.severity == "error" else "yellow")
        for finding in report.findings
    )
    return Group(*parts)


def render_sync(report: SyncReport, *, every_row: bool = True) -> str:
    """Return the report as plain text, for a file."""
    return plain_text(sync_table(report, every_row=every_row), width=160)


def _value(value: object) -> str:
    given = plain(value)
    return given if isinstance(given, str) else repr(given)
