"""Tables and plain text: a report gives columns and rows, this module lays them out for a terminal or a file.

No heading and no cell is cut: on a narrow terminal a table is as wide as its columns need, and the terminal breaks the
lines.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType

__all__ = ["Column", "plain_text", "show", "table"]

UNLIMITED = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column of a table."""

    heading: str = ""
    number: bool = False
    """Aligned at the right."""
    wraps: bool = False
    """May be broken between words where the console is narrow; other columns stay on one line."""


def table(
    columns: Sequence[Column | str], *sections: Iterable[Sequence[str | Text]], title: str = ""
) -> RenderableType:
    """Return a table that rich can print, its title in the line above.

    Args:
        columns: One for each cell of a row, a heading alone for a plain one; without any heading the table has no head.
        *sections: Rows; an empty line stands between two sections.
        title: One line; empty: none.
    """
    known = [Column(heading=column) if isinstance(column, str) else column for column in columns]
    made = Table(box=SIMPLE_HEAD, show_header=any(column.heading for column in known))
    kept = [list(section) for section in sections]
    for index, column in enumerate(known):
        cells = [column.heading, *(str(row[index]) for section in kept for row in section)]
        made.add_column(
            column.heading,
            justify="right" if column.number else "left",
            no_wrap=not column.wraps,
            overflow="fold",
            min_width=None if column.wraps else max(map(cell_len, cells)),
        )
    for section in kept:
        for row in section:
            made.add_row(*row, end_section=row is section[-1])
    return Group(Text(title), made) if title else made


def show(content: RenderableType, console: Console | None = None, *, least: int = 116) -> None:
    """Print a report without cutting anything.

    Args:
        content: What rich can print.
        console: Where to; None: standard output.
        least: Columns it gets where it can use them, on a narrower terminal too.
    """
    console = console or Console(highlight=False)
    before = console.width
    console.width = max(before, least, _needed(content, console))
    try:
        console.print(content)
    finally:
        console.width = before


def plain_text(content: RenderableType, *, width: int = 120, wrap: bool = True) -> str:
    """Return what rich can print as plain text, for a file or a pipe.

    Args:
        content: Text, a table, or a group of them.
        width: Columns it may use; more where a table needs more.
        wrap: Break sentences that are longer.
    """
    out = io.StringIO()
    console = Console(file=out, width=width, no_color=True, highlight=False)
    console.width = max(width, _needed(content, console))
    console.print(content, soft_wrap=not wrap)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _needed(content: RenderableType, console: Console) -> int:
    """Return the columns under which something would be cut."""
    return Measurement.get(console, console.options.update_width(UNLIMITED), content).minimum
