"""`QuantisationRow`: the errors of a run's quantisers as rows of a CSV file.

There is a row per operand, layer, module and measured step. Telemetry writes the rows, and the
reports, early warnings and proposals read them.
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
    """Name of the linear layer in its transformer layer."""
    operand: str
    """One of `OPERANDS`."""
    format: str
    """Number format: e4m3, e5m2 or e2m1."""
    amax: float
    """Largest magnitude before quantisation."""
    scale: float | None
    """Factor on the whole tensor before rounding. None: the scheme has a scale per tile."""
    underflow: float
    """Share of the nonzero elements that became zero, 0 to 1."""
    saturated: float
    """Share of all elements beyond the largest value of the format at their scale, 0 to 1."""
    sqnr_db: float
    """Signal-to-quantisation-noise ratio in dB.

    It is infinite without noise, and NaN if the tensor has NaN or infinity.
    """
    tensorwise_db: float = math.nan
    """The SQNR that the operand would have under this scheme, from a sample of its rows."""
    blockwise_db: float = math.nan
    """The same under blockwise scaling."""
    mxfp8_db: float = math.nan
    """The same under MXFP8."""
    nvfp4_db: float = math.nan
    """The same under NVFP4."""

    @property
    def location(self) -> str:
        """The operand, its layer and its module, for a sentence."""
        return f"the {self.operand} of layer {self.layer}, {self.module}"


COLUMN_TYPES = {field.name: field.type for field in fields(QuantisationRow)}
"""Column of the file -> type of its cells."""


def select_last_step(rows: Sequence[QuantisationRow]) -> list[QuantisationRow]:
    """Return the rows of the last measured step. The result is empty without rows."""
    if not rows:
        return []
    last = max(row.step for row in rows)
    return [row for row in rows if row.step == last]


def group_by_operand(rows: Iterable[QuantisationRow]) -> dict[str, list[QuantisationRow]]:
    """Return operand -> its rows, in the order of `OPERANDS`; an operand without rows is absent."""
    all_rows = list(rows)
    rows_of: dict[str, list[QuantisationRow]] = {}
    for operand in OPERANDS:
        for row in all_rows:
            if row.operand == operand:
                rows_of.setdefault(operand, []).append(row)
    return rows_of


def replace_non_finite(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with None in place of infinity and NaN, which JSON does not have."""
    numbers = dict(row)
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            numbers[name] = None
    return numbers


def write_rows(path: Path, rows: Sequence[QuantisationRow], *, append: bool = False) -> None:
    """Write rows as CSV with a heading; `append` adds them to a file that has the heading."""
    mode = "w"
    if append:
        mode = "a"
    with path.open(mode, newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if not append:
            writer.writerow(COLUMN_TYPES)
        writer.writerows(map(astuple, rows))


def parse_rows(text: str) -> list[QuantisationRow]:
    """Return the rows of a CSV text.

    A last line without a line end is left out: the run is still writing it.

    Raises:
        ValueError, TypeError, KeyError, csv.Error: The text is not a table of such rows.
    """
    complete_lines = text[: text.rfind("\n") + 1]
    rows = []
    for line in csv.DictReader(io.StringIO(complete_lines)):
        columns = {}
        for name, cell in line.items():
            columns[name] = _parse_cell(COLUMN_TYPES[name], cell)
        rows.append(QuantisationRow(**columns))
    return rows


def _parse_cell(column_type: Any, text: str) -> Any:
    """Return the value of a cell; an empty cell of a column of floats is None."""
    if column_type in (int, str):
        return column_type(text)
    if not text:
        return None
    return float(text)
