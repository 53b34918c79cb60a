"""The errors of a run's quantisers as rows: one per operand, layer, module and measured step, kept as CSV."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from bridge.precision.grouping import grouped

FILE = "quantisation.csv"
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
    """Signal-to-quantisation-noise ratio; infinite without noise, NaN with NaN or infinity in the tensor."""
    tensorwise_db: float = math.nan
    """The SQNR that the operand would have under this scheme, from a sample of its rows."""
    blockwise_db: float = math.nan
    mxfp8_db: float = math.nan
    nvfp4_db: float = math.nan

    @property
    def place(self) -> str:
        """The operand, its layer and module, for a sentence."""
        return f"the {self.operand} of layer {self.layer}, {self.module}"


def last_measured(rows: Sequence[QuantisationRow]) -> list[QuantisationRow]:
    """Return the rows of the last measured step."""
    last = max((row.step for row in rows), default=0)
    return [row for row in rows if row.step == last]


def by_operand(rows: Iterable[QuantisationRow]) -> dict[str, list[QuantisationRow]]:
    """Return the rows of each operand that has some, in the order of `OPERANDS`."""
    found = grouped((row.operand, row) for row in rows)
    return {operand: found[operand] for operand in OPERANDS if operand in found}


def finite(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with numbers that JSON has: None for infinity and NaN."""
    return {
        name: None if isinstance(one, float) and not math.isfinite(one) else one
        for name, one in row.items()
    }


def write_rows(path: Path, rows: Sequence[QuantisationRow], *, append: bool = False) -> None:
    """Write rows as CSV, or add them to a file of rows."""
    with path.open("a" if append else "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if not append:
            writer.writerow([field.name for field in fields(QuantisationRow)])
        writer.writerows(map(astuple, rows))


def rows_of(text: str) -> list[QuantisationRow]:
    """Return the rows of a CSV text; a last line that is being written is left out. ValueError, TypeError: no table."""
    lines = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
    kinds = {field.name: field.type for field in fields(QuantisationRow)}
    return [
        QuantisationRow(**{name: _value(kinds[name], one) for name, one in line.items()})
        for line in lines
    ]


def _value(kind: Any, text: str) -> Any:
    if kind in (int, str):
        return kind(text)
    return float(text) if text else None
