"""Makes tables and plain text from rows. A row is a mapping from heading to cell.

No heading and no cell is cut. On a terminal that is too narrow for a table, its columns are
spread over several tables, each with the key columns. A file gets one table of any width.
"""

import io
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

UNLIMITED_WIDTH = 10_000
"""A width, in characters, at which nothing is cut."""
LAYER_COUNT_NOTE = "; layers count from 1"
"""The end of the title of each table of layers."""
BYTE_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
FILE_WIDTH = 116
"""The width, in characters, of the sentences of a report in a file or a pipe."""


Cell = str | Text
Row = Mapping[str, Cell]
"""Heading -> cell. Every row of a table has the headings of the first row, in the same order."""
VALUE_HEADING = " "
"""The heading of the values of `make_facts_table`. The names have the heading "".

Both headings are blank, so the table is printed without headings. They differ, since a row is a
mapping.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _SectionedTable:
    """Rows in sections, laid out for the width of the console that prints them."""

    sections: Sequence[Sequence[Row]]
    keys: int
    """The number of key columns, which every part of a table repeats."""
    numbers: Collection[str]
    """Headings of the columns that are aligned at the right."""
    wraps: Collection[str]
    """Headings of the columns whose cells may be broken over lines."""

    @property
    def headings(self) -> list[str]:
        """The headings of the first row; empty without rows."""
        for section in self.sections:
            for row in section:
                return list(row)
        return []

    def lay_out(self, chosen: Sequence[str], *, narrow: bool = False) -> Table:
        """Return a table of the chosen columns. If it is narrow, every cell may be broken."""
        has_head = any(heading.strip() for heading in self.headings)
        table = Table(box=SIMPLE_HEAD, show_header=has_head)
        for heading in chosen:
            self._add_column(table, heading, narrow=narrow)
        for section in self.sections:
            for row in section:
                cells = [row[heading] for heading in chosen]
                table.add_row(*cells, end_section=row is section[-1])
        return table

    def _add_column(self, table: Table, heading: str, *, narrow: bool) -> None:
        """Add an empty column that is at least as wide as its longest cell or word."""
        wraps = heading in self.wraps or narrow
        texts = [heading]
        for section in self.sections:
            texts.extend(str(row[heading]) for row in section)
        if wraps:
            texts = " ".join(texts).split()
        min_width = None
        if not narrow:
            min_width = max(map(cell_len, texts), default=0)
        justify: Literal["left", "right"] = "left"
        if heading in self.numbers:
            justify = "right"
        table.add_column(
            heading, justify=justify, no_wrap=not wraps, overflow="fold", min_width=min_width
        )

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self.lay_out(self.headings))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """Yield one table, or several that each have as many columns as fit."""

        def fits(chosen: Sequence[str]) -> bool:
            free = options.update_width(UNLIMITED_WIDTH)
            needed = Measurement.get(console, free, self.lay_out(chosen)).minimum
            return needed <= options.max_width

        keys, rest = self.headings[: self.keys], self.headings[self.keys :]
        while True:
            count = len(rest)
            while count > 1 and not fits([*keys, *rest[:count]]):
                count -= 1
            count = max(count, 1)
            chosen, rest = [*keys, *rest[:count]], rest[count:]
            yield self.lay_out(chosen, narrow=not fits(chosen))
            if not rest:
                return


def make_table(
    *sections: Iterable[Row],
    title: str = "",
    keys: int = 1,
    numbers: Collection[str] = (),
    wraps: Collection[str] = (),
) -> RenderableType:
    """Return a table that rich can print, with a line between two sections.

    Args:
        title: The line above the table.
        keys: The number of columns that name the subject of a row.
        numbers: Headings of the columns that are aligned at the right.
        wraps: Headings of the columns that may be broken between words on a narrow console.
    """
    rows = [list(section) for section in sections]
    table = _SectionedTable(sections=rows, keys=keys, numbers=numbers, wraps=wraps)
    if not title:
        return table
    return Group(Text(title), table)


def make_facts_table(
    rows: Iterable[tuple[str, Cell]], *, title: str = "", numbers: bool = False
) -> RenderableType:
    """Return names with their values as a table without headings.

    Args:
        rows: Names with values.
        title: The line above the table.
        numbers: Whether the values are aligned at the right.
    """
    named = [{"": name, VALUE_HEADING: value} for name, value in rows]
    if numbers:
        return make_table(named, title=title, numbers=(VALUE_HEADING,))
    return make_table(named, title=title, wraps=(VALUE_HEADING,))


def format_markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows as a table in Markdown."""
    lines = [f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}"]
    for row in rows:
        lines.append(f"| {' | '.join(row.values())} |")
    return "\n".join(lines)


def format_cell(value: float | None, form: str = ".4f") -> str:
    """Return a number as a cell; "-" if there is no number."""
    if value is None:
        return "-"
    return format(value, form)


def format_mib(size_bytes: float | None) -> str:
    """Return a size in MiB as a cell; "-" for None, and "< 0.1" for a small size above 0."""
    if size_bytes is None:
        return "-"
    mib = f"{size_bytes / 2**20:,.1f}"
    if mib == "0.0" and size_bytes > 0:
        return "< 0.1"
    return mib


def format_bytes(count: float) -> str:
    """Return a number of bytes with three digits: "37.9 GiB"."""
    for unit, name in BYTE_UNITS:
        if count >= unit:
            amount = count / unit
            if amount >= 100:
                return f"{amount:.0f} {name}"
            if amount >= 10:
                return f"{amount:.1f} {name}"
            return f"{amount:.2f} {name}"
    return f"{count:.0f} B"


def print_renderable(content: RenderableType, console: Console | None = None) -> None:
    """Print a report without cutting anything.

    A terminal keeps its width. A file or a pipe gets the width that the report needs.
    """
    console = console or Console(highlight=False)
    width_before = console.width
    if not console.is_terminal:
        console.width = max(width_before, FILE_WIDTH, _measure_width(content, console))
    try:
        console.print(content, soft_wrap=not console.is_terminal)
    finally:
        console.width = width_before


def render_plain_text(content: RenderableType, *, width: int = 120) -> str:
    """Return a renderable of rich as plain text, for a file or a pipe."""
    out = io.StringIO()
    console = Console(file=out, width=width, no_color=True, highlight=False)
    console.width = max(width, _measure_width(content, console))
    console.print(content)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _measure_width(content: RenderableType, console: Console) -> int:
    """Return the least width on which nothing of the content is cut."""
    return Measurement.get(console, console.options.update_width(UNLIMITED_WIDTH), content).minimum
