"""Tables and plain text: a report gives columns and rows, this module lays them out for a terminal or a file.

No heading and no cell is cut. On a terminal that is too narrow for a table, its columns are spread over several tables,
each with the first columns; a file gets one table, as wide as it needs.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

UNLIMITED = 10_000
NUMBERED = "; layers count from 1"
"""The end of the title of each table of layers."""
FILE_WIDTH = 116
"""Columns that a report in a file or a pipe may use for its sentences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column of a table."""

    heading: str = ""
    number: bool = False
    """Aligned at the right."""
    wraps: bool = False
    """May be broken between words where the console is narrow; other columns stay on one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sections:
    """Rows in sections under columns, laid out for the width they are printed in."""

    columns: Sequence[Column]
    sections: Sequence[Sequence[Sequence[str | Text]]]
    keys: int
    """First columns, which each part of a table that is spread over several has."""

    def laid_out(self, chosen: Sequence[int], *, narrow: bool = False) -> Table:
        """Return a table of the chosen columns; in a narrow one every cell may be broken."""
        made = Table(box=SIMPLE_HEAD, show_header=any(column.heading for column in self.columns))
        for index in chosen:
            column = self.columns[index]
            cells = [column.heading, *(str(row[index]) for section in self.sections for row in section)]
            wraps = column.wraps or narrow
            kept_whole = [word for text in cells for word in text.split()] if wraps else cells
            made.add_column(
                column.heading,
                justify="right" if column.number else "left",
                no_wrap=not wraps,
                overflow="fold",
                min_width=None if narrow else max(map(cell_len, kept_whole), default=0),
            )
        for section in self.sections:
            for row in section:
                made.add_row(*(row[index] for index in chosen), end_section=row is section[-1])
        return made

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self.laid_out(range(len(self.columns))))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """Yield one table, or several with as many columns as fit."""

        def fits(chosen: Sequence[int]) -> bool:
            free = options.update_width(UNLIMITED)
            return Measurement.get(console, free, self.laid_out(chosen)).minimum <= options.max_width

        keys, rest = list(range(self.keys)), list(range(self.keys, len(self.columns)))
        while True:
            count = next((count for count in range(len(rest), 1, -1) if fits([*keys, *rest[:count]])), 1)
            chosen, rest = [*keys, *rest[:count]], rest[count:]
            yield self.laid_out(chosen, narrow=not fits(chosen))
            if not rest:
                return


def table(
    columns: Sequence[Column | str], *sections: Iterable[Sequence[str | Text]], title: str = "", keys: int = 1
) -> RenderableType:
    """Return a table that rich can print, its title in the line above.

    Args:
        columns: One for each cell of a row, a heading alone for a plain one; without any heading the table has no head.
        *sections: Rows; an empty line stands between two sections.
        title: One line; empty: none.
        keys: First columns that say what a row is about.
    """
    known = [Column(heading=column) if isinstance(column, str) else column for column in columns]
    made = _Sections(columns=known, sections=[list(section) for section in sections], keys=keys)
    return Group(Text(title), made) if title else made


def cell(value: float | None, form: str = ".4f") -> str:
    """Return a number as a cell; "-" without one."""
    return "-" if value is None else format(value, form)


def mib(size_bytes: float) -> str:
    """Return a size in MiB as a cell; what is there is never 0.0."""
    text = f"{size_bytes / 2**20:,.1f}"
    return "< 0.1" if text == "0.0" and size_bytes > 0 else text


def show(content: RenderableType, console: Console | None = None) -> None:
    """Print a report without cutting anything, in the width of a terminal, or as wide as it needs."""
    console = console or Console(highlight=False)
    before = console.width
    if not console.is_terminal:
        console.width = max(before, FILE_WIDTH, _needed(content, console))
    try:
        console.print(content, soft_wrap=not console.is_terminal)
    finally:
        console.width = before


def plain_text(content: RenderableType, *, width: int = 120) -> str:
    """Return what rich can print as plain text, for a file or a pipe."""
    out = io.StringIO()
    console = Console(file=out, width=width, no_color=True, highlight=False)
    console.width = max(width, _needed(content, console))
    console.print(content)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _needed(content: RenderableType, console: Console) -> int:
    """Return the columns under which something would be cut."""
    return Measurement.get(console, console.options.update_width(UNLIMITED), content).minimum
