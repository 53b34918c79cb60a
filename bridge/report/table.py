"""Tables and plain text: a report gives rows, each cell by its heading, and this module lays them out.

No heading and no cell is cut. On a terminal that is too narrow for a table, its columns are spread over several tables,
each with the first columns; a file gets one table, as wide as it needs.
"""

import io
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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


Cell = str | Text
Row = Mapping[str, Cell]
"""Heading -> cell. Every row of a table has the headings of the first one, in its order."""
VALUE = " "
"""The heading of the values of `facts`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sections:
    """Rows in sections, laid out for the width they are printed in."""

    sections: Sequence[Sequence[Row]]
    keys: int
    numbers: Collection[str]
    wraps: Collection[str]

    @property
    def headings(self) -> list[str]:
        return list(next((row for section in self.sections for row in section), {}))

    def laid_out(self, chosen: Sequence[str], *, narrow: bool = False) -> Table:
        """Return a table of the chosen columns; in a narrow one every cell may be broken."""
        made = Table(box=SIMPLE_HEAD, show_header=any(heading.strip() for heading in self.headings))
        for heading in chosen:
            cells = [heading, *(str(row[heading]) for section in self.sections for row in section)]
            wraps = heading in self.wraps or narrow
            kept_whole = [word for text in cells for word in text.split()] if wraps else cells
            made.add_column(
                heading,
                justify="right" if heading in self.numbers else "left",
                no_wrap=not wraps,
                overflow="fold",
                min_width=None if narrow else max(map(cell_len, kept_whole), default=0),
            )
        for section in self.sections:
            for row in section:
                made.add_row(*(row[heading] for heading in chosen), end_section=row is section[-1])
        return made

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self.laid_out(self.headings))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """Yield one table, or several with as many columns as fit."""

        def fits(chosen: Sequence[str]) -> bool:
            free = options.update_width(UNLIMITED)
            return (
                Measurement.get(console, free, self.laid_out(chosen)).minimum <= options.max_width
            )

        keys, rest = self.headings[: self.keys], self.headings[self.keys :]
        while True:
            count = next(
                (count for count in range(len(rest), 1, -1) if fits([*keys, *rest[:count]])), 1
            )
            chosen, rest = [*keys, *rest[:count]], rest[count:]
            yield self.laid_out(chosen, narrow=not fits(chosen))
            if not rest:
                return


def table(
    *sections: Iterable[Row],
    title: str = "",
    keys: int = 1,
    numbers: Collection[str] = (),
    wraps: Collection[str] = (),
) -> RenderableType:
    """Return a table that rich can print, its title in the line above, with an empty line between two sections.

    The first `keys` columns say what a row is about. Columns whose headings are in `numbers` are aligned at the right,
    and those in `wraps` may be broken between words where the console is narrow.
    """
    made = _Sections(
        sections=[list(section) for section in sections], keys=keys, numbers=numbers, wraps=wraps
    )
    return Group(Text(title), made) if title else made


def facts(
    rows: Iterable[tuple[str, Cell]], *, title: str = "", numbers: bool = False
) -> RenderableType:
    """Return names with their values as a table without a head."""
    named = [{"": name, VALUE: value} for name, value in rows]
    return table(
        named, title=title, numbers=(VALUE,) if numbers else (), wraps=() if numbers else (VALUE,)
    )


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows as a table in Markdown."""
    head, *lines = (
        f"| {' | '.join(cells)} |" for cells in ([*rows[0]], *(row.values() for row in rows))
    )
    return "\n".join([head, f"|{'---|' * len(rows[0])}", *lines])


def cell(value: float | None, form: str = ".4f") -> str:
    """Return a number as a cell; "-" without one."""
    return "-" if value is None else format(value, form)


def mib(size_bytes: float | None) -> str:
    """Return a size in MiB as a cell, "-" without one; what is there is never 0.0."""
    if size_bytes is None:
        return "-"
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
