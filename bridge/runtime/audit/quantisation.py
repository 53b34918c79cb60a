"""The errors of a run's quantisers as rows, kept as CSV.

There is a row per operand, layer, module and measured step.
"""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

QUANTISATION_FILE = "quantisation.csv"
"""Name of the file in a run's folder."""
OPERANDS = ("input", "weight", "grad_output")


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantisationRow:
    """One operand of one layer at one step."""

    step: int
    layer: int
    """Number of the transformer layer in the whole model, from 1 on."""
    module: str
    operand: str
    """One of `OPERANDS`."""
    format: str
    amax: float
    """Largest magnitude before quantisation."""
    scale: float | None
    """The factor the whole tensor went in with; None where tiles have their own."""
    underflow: float
    """Share of the elements other than zero that became zero, 0 to 1."""
    saturated: float
    """Share of all elements beyond the largest value of the format at their scale, 0 to 1."""
    sqnr_db: float
    """Signal-to-quantisation-noise ratio.

    Infinite without noise, NaN with NaN or infinity in the tensor.
    """
    tensorwise_db: float = math.nan
    """The SQNR that the operand would have under this scheme, from a sample of its rows."""
    blockwise_db: float = math.nan
    mxfp8_db: float = math.nan
    nvfp4_db: float = math.nan

    @property
    def place(self) -> str:
        """The operand, its layer and module, for a sentence."""
        return f"the {self.operand} of layer {self.layer}, {self.module}"


COLUMN_TYPES = {field.name: field.type for field in fields(QuantisationRow)}
"""Column of the file -> its type."""


def select_last_step(rows: Sequence[QuantisationRow]) -> list[QuantisationRow]:
    """Return the rows of the last measured step."""
    if not rows:
        return []
    last = max(row.step for row in rows)
    return [row for row in rows if row.step == last]


def group_by_operand(rows: Iterable[QuantisationRow]) -> dict[str, list[QuantisationRow]]:
    """Return the rows of each operand that has some, in the order of `OPERANDS`."""
    all_rows = list(rows)
    rows_of: dict[str, list[QuantisationRow]] = {}
    for operand in OPERANDS:
        for row in all_rows:
            if row.operand == operand:
                rows_of.setdefault(operand, []).append(row)
    return rows_of


def replace_non_finite(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with numbers that JSON has: None for infinity and NaN."""
    numbers = dict(row)
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            numbers[name] = None
    return numbers


def write_rows(path: Path, rows: Sequence[QuantisationRow], *, append: bool = False) -> None:
    """Write rows as CSV, or add them to a file of rows."""
    mode = "a" if append else "w"
    with path.open(mode, newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if not append:
            writer.writerow(COLUMN_TYPES)
        writer.writerows(map(astuple, rows))


def parse_rows(text: str) -> list[QuantisationRow]:
    """Return the rows of a CSV text; a last line that is being written is left out.

    Raises:
        ValueError, TypeError, KeyError, csv.Error: The text is no table of such rows.
    """
    lines = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
    rows = []
    for line in lines:
        columns = {}
        for name, cell in line.items():
            columns[name] = _parse_cell(COLUMN_TYPES[name], cell)
        rows.append(QuantisationRow(**columns))
    return rows


def _parse_cell(kind: Any, text: str) -> Any:
    """Return the value of a cell, None for an empty cell of a float."""
    if kind in (int, str):
        return kind(text)
    if not text:
        return None
    return float(text)
