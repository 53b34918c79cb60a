"""A sync report for people: what changed, what was kept, what will not act."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from bridge.sync.report import SyncReport, SyncRow, plain

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["render_sync", "sync_table"]

STYLES = {
    "override": "yellow",
    "set": "green",
    "derive": "cyan",
    "neutralise": "magenta",
    "keep": "blue",
    "absent": "red",
    "agree": "dim",
}


def sync_table(report: SyncReport, *, every_row: bool = False) -> RenderableType:
    """Return the report as something rich can print.

    Args:
        report: The result of a sync.
        every_row: Also show the fields that already agreed, and those that are absent and were not asked for.
    """
    table = Table(title=f"{report.precision} on megatron-core {report.megatron_version}", title_justify="left")
    table.box = box.SIMPLE_HEAD
    for heading in ("field", "was", "is", "verdict", "by"):
        table.add_column(heading, no_wrap=True)
    table.add_column("why")
    shown = [row for row in report.rows if every_row or row.changes or row.verdict == "keep"]
    for row in shown:
        path = f"{row.owner}.{row.attribute}"
        verdict = Text(row.verdict, style=STYLES[row.verdict])
        table.add_row(path, _value(row.old), _value(row.new), verdict, _by(row, report.precision), row.why)
    parts: list[RenderableType] = [table] if shown else []
    if len(report.rows) > len(shown):
        parts.append(Text(f"  {len(report.rows) - len(shown)} more fields are as they were.", style="dim"))
    parts.extend(
        Text(f"{finding.severity}: {finding}", style="red" if finding.severity == "error" else "yellow")
        for finding in report.findings
    )
    return Group(*parts)


def render_sync(report: SyncReport, *, every_row: bool = True, width: int = 160) -> str:
    """Return the report as plain text, for a file."""
    out = io.StringIO()
    Console(file=out, width=width, no_color=True).print(sync_table(report, every_row=every_row))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _by(row: SyncRow, precision: str) -> str:
    return "recipe" if row.by == f"recipe {precision.partition(',')[0]}" else row.by


def _value(value: object) -> str:
    shown = plain(value)
    return shown if isinstance(shown, str) else repr(shown)
