"""Quantisation of a run's operands: a table, and a heat map over layers and steps."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from bridge.precision.formats import FORMATS
from bridge.precision.schemes import COMPARED_SCHEMES
from bridge.report.curves import make_figure
from bridge.report.table import LAYER_COUNT_NOTE, make_table
from bridge.runtime.audit.quantisation import QuantisationRow, group_by_operand, select_last_step

WORST_DB = 12.0
"""Distance below the healthy ratio at which a heat map has its strongest colour: two bits."""


def make_quantisation_table(rows: Sequence[QuantisationRow], *, title: str) -> RenderableType:
    """Return every row of the last measured step as a table for the terminal."""
    last = select_last_step(rows)
    lines: list[dict[str, str]] = []
    for row in last:
        scale = "tiles"
        if row.scale is not None:
            scale = f"{row.scale:.4g}"
        elif not row.format:
            scale = "-"  # read from a log without a plan
        line = {
            "layer": str(row.layer),
            "module": _shorten_name(row.module),
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
            line[f"if {scheme}"] = _format_known(f"{ratio:.1f}")
        lines.append(line)
    numbers = {*lines[0]} - {"module", "operand", "format"}
    return make_table(
        lines, title=f"{title}, step {last[0].step}{LAYER_COUNT_NOTE}", numbers=numbers
    )


def make_worst_table(rows: Sequence[QuantisationRow]) -> RenderableType:
    """Return per operand the mean and the worst layer over all measured steps, for a run's end."""
    finite = [row for row in rows if math.isfinite(row.sqnr_db)]
    lines: list[dict[str, str]] = []
    for operand, of_operand in group_by_operand(finite).items():
        lowest = min(of_operand, key=lambda row: row.sqnr_db)
        line = {
            "operand": f"{operand} ({lowest.format})",
            "dB, mean": _format_mean(of_operand, "sqnr_db"),
        }
        for scheme in COMPARED_SCHEMES:
            line[f"if {scheme}"] = _format_mean(of_operand, f"{scheme}_db")
        line["lowest"] = f"{lowest.sqnr_db:.1f}"
        line["where"] = f"{lowest.layer} {_shorten_name(lowest.module)}, step {lowest.step}"
        line["to zero"] = _format_percent(_find_largest(of_operand, "underflow"))
        line["saturated"] = _format_percent(_find_largest(of_operand, "saturated"))
        lines.append(line)
    numbers: set[str] = set()
    if lines:
        numbers = {*lines[0]} - {"operand", "where"}
    title = (
        f"Signal to quantisation noise; the most that went to zero or saturated{LAYER_COUNT_NOTE}"
    )
    return make_table(lines, title=title, numbers=numbers)


def _format_mean(rows: Sequence[QuantisationRow], name: str) -> str:
    values = []
    for row in rows:
        value = getattr(row, name)
        if math.isfinite(value):
            values.append(value)
    if not values:
        return "-"
    return f"{sum(values) / len(values):.1f}"


def _find_largest(rows: Sequence[QuantisationRow], name: str) -> float:
    largest: float = max(getattr(row, name) for row in rows)
    return largest


def _format_known(number: str) -> str:
    """Return the text of a number, and a dash for one that is not known."""
    if number == "nan":
        return "-"
    return number


def _format_percent(share: float) -> str:
    if math.isnan(share):
        return "-"
    if share == 0:
        return "0"
    return f"{100 * share:.2g} %"


def plot_quantisation(path: Path, rows: Sequence[QuantisationRow], *, title: str) -> None:
    """Draw the SQNR of each operand as a heat map into a PNG.

    Layers and modules go down, measured steps across. The colour is the distance below what the
    format should have, so that formats look alike where they are healthy.
    """
    all_steps, all_places = set(), set()
    for row in rows:
        all_steps.add(row.step)
        all_places.add((row.layer, row.module))
    steps, places = sorted(all_steps), sorted(all_places)
    present = group_by_operand(rows)
    figure = make_figure(3 + 3 * len(present), max(3.0, 1.4 + 0.2 * len(places)))
    subject = "signal to quantisation noise, against that of a healthy tensor in the same format"
    figure.suptitle(f"{title}\n{subject}", fontsize=11)
    axes = figure.subplots(1, len(present), sharey=True, squeeze=False)[0]
    for panel, (operand, of_operand) in zip(axes, present.items(), strict=True):
        grid = _make_grid(of_operand, places, steps)
        style: dict[str, Any] = {"cmap": "cividis", "interpolation": "nearest"}
        image = panel.imshow(grid, aspect="auto", vmin=-WORST_DB, vmax=0, **style)
        formats = dict.fromkeys(row.format for row in of_operand)
        panel.set_title(f"{operand} ({', '.join(formats)})", fontsize=10)
        every = max(1, len(steps) // 6)
        panel.set_xticks(range(0, len(steps), every), list(map(str, steps[::every])))
        panel.set_xlabel("step")
    labels = [f"{layer} {_shorten_name(module)}" for layer, module in places]
    axes[0].set_yticks(range(len(places)), labels, fontsize=7)
    axes[0].set_ylabel("layer and module")
    figure.colorbar(image, ax=list(axes), label="dB, 0 is healthy")
    figure.savefig(path, dpi=120)


def _make_grid(
    rows: Sequence[QuantisationRow], places: Sequence[tuple[int, str]], steps: Sequence[int]
) -> list[list[float]]:
    """Return the distance to the healthy ratio by place and step; NaN where nothing is known."""
    below: dict[tuple[int, str, int], float] = {}
    for row in rows:
        if row.format in FORMATS:
            healthy = FORMATS[row.format].healthy_db
            below[row.layer, row.module, row.step] = row.sqnr_db - healthy
    grid = []
    for layer, module in places:
        grid.append([below.get((layer, module, step), math.nan) for step in steps])
    return grid


def _shorten_name(module: str) -> str:
    return module.rsplit(".", maxsplit=1)[-1].removeprefix("linear_")
