"""The report of a sync as plain text: every field that it wrote or compared, and the findings."""

from rich.console import Group, RenderableType

from bridge.precision.coercion import to_plain_data
from bridge.report.table import make_table, render_plain_text
from bridge.sync.report import SyncReport


def render_sync(report: SyncReport) -> str:
    """Return the report as plain text for a file."""
    recipe = f"recipe {report.precision.partition(',')[0]}"
    rows = []
    for row in report.rows:
        by = row.by.name
        if by == recipe:  # the title names the recipe
            by = "recipe"
        rows.append(
            {
                "field": row.path,
                "was": _format_value(row.old),
                "is": _format_value(row.new),
                "verdict": row.verdict,
                "by": by,
                "why": row.why,
            }
        )
    title = f"{report.precision} on megatron-core {report.megatron_version}"
    parts: list[RenderableType] = []
    if rows:
        parts.append(make_table(rows, title=title, wraps=("why",)))
    for finding in report.findings:
        parts.append(f"{finding.severity}: {finding}")
    return render_plain_text(Group(*parts), width=160)


def _format_value(value: object) -> str:
    """Return a value as text, a string without quotes."""
    plain = to_plain_data(value)
    if isinstance(plain, str):
        return plain
    return repr(plain)
