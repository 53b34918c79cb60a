"""Tables and plain text: a report gives rows, each cell by its heading; this module lays them out.

No heading and no cell is cut. On a terminal that is too narrow for a table, its columns are spread
over several tables, each with the first columns. A file gets one table, as wide as it needs.
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
LAYER_COUNT_NOTE = "; layers count from 1"
"""The end of the title of each table of layers."""
FILE_WIDTH = 116
"""Columns that a report in a file or a pipe may use for its sentences."""


Cell = str | Text
Row = Mapping[str, Cell]
"""Heading -> cell. Every row of a table has the headings of the first one, in its order."""
VALUE_HEADING = " "
"""The heading of the values of `facts`, whose names have the heading "".

Both are blank, so that the table is printed without a head. They differ, since a row is a mapping.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _SectionedTable:
    """Rows in sections, laid out for the width they are printed in."""

    sections: Sequence[Sequence[Row]]
    keys: int
    numbers: Collection[str]
    wraps: Collection[str]

    @property
    def headings(self) -> list[str]:
        for section in self.sections:
            for row in section:
                return list(row)
        return []

    def laid_out(self, chosen: Sequence[str], *, narrow: bool = False) -> Table:
        """Return a table of the chosen columns; in a narrow one every cell may be broken."""
        has_head = any(heading.strip() for heading in self.headings)
        made = Table(box=SIMPLE_HEAD, show_header=has_head)
        for heading in chosen:
            self._add_column(made, heading, narrow=narrow)
        for section in self.sections:
            for row in section:
                cells = [row[heading] for heading in chosen]
                made.add_row(*cells, end_section=row is section[-1])
        return made

    def _add_column(self, made: Table, heading: str, *, narrow: bool) -> None:
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
        made.add_column(
            heading, justify=justify, no_wrap=not wraps, overflow="fold", min_width=min_width
        )

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self.laid_out(self.headings))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """Yield one table, or several with as many columns as fit."""

        def fits(chosen: Sequence[str]) -> bool:
            free = options.update_width(UNLIMITED_WIDTH)
            needed = Measurement.get(console, free, self.laid_out(chosen)).minimum
            return needed <= options.max_width

        keys, rest = self.headings[: self.keys], self.headings[self.keys :]
        while True:
            count = len(rest)
            while count > 1 and not fits([*keys, *rest[:count]]):
                count -= 1
            count = max(count, 1)
            chosen, rest = [*keys, *rest[:count]], rest[count:]
            yield self.laid_out(chosen, narrow=not fits(chosen))
            if not rest:
                return


def make_table(
    *sections: Iterable[Row],
    title: str = "",
    keys: int = 1,
    numbers: Collection[str] = (),
    wraps: Collection[str] = (),
) -> RenderableType:
    """Return a table that rich can print, with an empty line between two sections.

    The title stands in the line above. The first `keys` columns say what a row is about. Columns
    whose headings are in `numbers` are aligned at the right. Those in `wraps` may be broken between
    words where the console is narrow.
    """
    rows = [list(section) for section in sections]
    made = _SectionedTable(sections=rows, keys=keys, numbers=numbers, wraps=wraps)
    if not title:
        return made
    return Group(Text(title), made)


def make_facts_table(
    rows: Iterable[tuple[str, Cell]], *, title: str = "", numbers: bool = False
) -> RenderableType:
    """Return names with their values as a table without a head."""
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
    """Return a number as a cell; "-" without one."""
    if value is None:
        return "-"
    return format(value, form)


def format_mib(size_bytes: float | None) -> str:
    """Return a size in MiB as a cell, "-" without one; what is there is never 0.0."""
    if size_bytes is None:
        return "-"
    text = f"{size_bytes / 2**20:,.1f}"
    if text == "0.0" and size_bytes > 0:
        return "< 0.1"
    return text


def print_renderable(content: RenderableType, console: Console | None = None) -> None:
    """Print a report without cutting anything.

    A terminal keeps its width, anything else gets the width that the report needs.
    """
    console = console or Console(highlight=False)
    before = console.width
    if not console.is_terminal:
        console.width = max(before, FILE_WIDTH, _measure_width(content, console))
    try:
        console.print(content, soft_wrap=not console.is_terminal)
    finally:
        console.width = before


def render_plain_text(content: RenderableType, *, width: int = 120) -> str:
    """Return what rich can print as plain text, for a file or a pipe."""
    out = io.StringIO()
    console = Console(file=out, width=width, no_color=True, highlight=False)
    console.width = max(width, _measure_width(content, console))
    console.print(content)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _measure_width(content: RenderableType, console: Console) -> int:
    """Return the columns under which something would be cut."""
    return Measurement.get(console, console.options.update_width(UNLIMITED_WIDTH), content).minimum
