"""The errors of a run's quantisers as tables."""

import math
from collections.abc import Sequence

from rich.console import RenderableType

from bridge.precision.schemes import COMPARED_SCHEMES
from bridge.report.table import LAYER_COUNT_NOTE, make_table
from bridge.runtime.audit.quantisation import QuantisationRow, group_by_operand, select_last_step


def make_quantisation_table(rows: Sequence[QuantisationRow], *, title: str) -> RenderableType:
    """Return a table with a row for each operand of the last measured step."""
    last_rows = select_last_step(rows)
    lines = [_make_cells(row) for row in last_rows]
    numbers = {*lines[0]} - {"module", "operand", "format"}
    full_title = f"{title}, step {last_rows[0].step}{LAYER_COUNT_NOTE}"
    return make_table(lines, title=full_title, numbers=numbers)


def _make_cells(row: QuantisationRow) -> dict[str, str]:
    """Return the cells of a row by heading."""
    scale = "tiles"
    if row.scale is not None:
        scale = f"{row.scale:.4g}"
    elif not row.format:
        scale = "-"  # read from a log without a plan
    cells = {
        "layer": str(row.layer),
        "module": shorten_module_name(row.module),
        "operand": row.operand,
        "format": row.format,
        "amax": _format_known(f"{row.amax:.3g}"),
        "scale": scale,
        "to zero": _format_percent(row.underflow),
        "saturated": _format_percent(row.saturated),
        "SQNR dB": _format_known(f"{row.sqnr_db:.1f}"),
    }
    for scheme in COMPARED_SCHEMES:
        ratio = getattr(row, f"{scheme}_db")
        cells[f"if {scheme}"] = _format_known(f"{ratio:.1f}")
    return cells


def make_worst_table(rows: Sequence[QuantisationRow]) -> RenderableType:
    """Return the mean and the lowest SQNR of each operand over all measured steps."""
    finite = [row for row in rows if math.isfinite(row.sqnr_db)]
    lines = []
    for operand, of_operand in group_by_operand(finite).items():
        lines.append(_make_worst_cells(operand, of_operand))
    numbers: set[str] = set()
    if lines:
        numbers = {*lines[0]} - {"operand", "where"}
    title = (
        f"Signal to quantisation noise; the most that went to zero or saturated{LAYER_COUNT_NOTE}"
    )
    return make_table(lines, title=title, numbers=numbers)


def _make_worst_cells(operand: str, rows: Sequence[QuantisationRow]) -> dict[str, str]:
    """Return the cells of an operand: mean SQNR, lowest SQNR, and the place of the lowest SQNR."""
    lowest = min(rows, key=lambda row: row.sqnr_db)
    cells = {
        "operand": f"{operand} ({lowest.format})",
        "dB, mean": _format_mean(rows, "sqnr_db"),
    }
    for scheme in COMPARED_SCHEMES:
        cells[f"if {scheme}"] = _format_mean(rows, f"{scheme}_db")
    cells["lowest"] = f"{lowest.sqnr_db:.1f}"
    cells["where"] = f"{lowest.layer} {shorten_module_name(lowest.module)}, step {lowest.step}"
    cells["to zero"] = _format_percent(max(row.underflow for row in rows))
    cells["saturated"] = _format_percent(max(row.saturated for row in rows))
    return cells


def _format_mean(rows: Sequence[QuantisationRow], name: str) -> str:
    """Return the mean of a field over the rows in which it is finite."""
    values = []
    for row in rows:
        value = getattr(row, name)
        if math.isfinite(value):
            values.append(value)
    if not values:
        return "-"
    return f"{sum(values) / len(values):.1f}"


def _format_known(number: str) -> str:
    """Return the text of a number; "-" for NaN, which means an unknown number."""
    if number == "nan":
        return "-"
    return number


def _format_percent(share: float) -> str:
    """Return a share in percent; "0" only for exactly 0, "-" for NaN."""
    if math.isnan(share):
        return "-"
    if share == 0:
        return "0"
    return f"{100 * share:.2g} %"


def shorten_module_name(module: str) -> str:
    """Return the last part of a module's name: "fc1" for "mlp.linear_fc1"."""
    return module.rsplit(".", maxsplit=1)[-1].removeprefix("linear_")
