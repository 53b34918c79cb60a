"""The errors of a run's quantisers as a heat map over layers and steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.precision.formats import FORMATS
from bridge.report.curves import make_figure
from bridge.report.quantisation_table import shorten_module_name
from bridge.runtime.audit.quantisation import QuantisationRow, group_by_operand

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

Place = tuple[int, str]
"""A layer and the name of a module in it."""
MAX_STEP_LABELS = 6
WORST_DB = 12.0
"""Decibels below the healthy SQNR at which a heat map has its strongest colour.

They equal two bits: a bit of precision is about 6 dB.
"""


def plot_quantisation(path: Path, rows: Sequence[QuantisationRow], *, title: str) -> None:
    """Draw the SQNR of each operand as a heat map into a PNG.

    Layers and modules go down, measured steps across. The colour is the distance below the SQNR of
    a healthy tensor in the same format, so healthy tensors look alike in every format.
    """
    steps = sorted({row.step for row in rows})
    places = sorted({(row.layer, row.module) for row in rows})
    rows_of = group_by_operand(rows)
    figure = make_figure(3 + 3 * len(rows_of), max(3.0, 1.4 + 0.2 * len(places)))
    subject = "signal to quantisation noise, against that of a healthy tensor in the same format"
    figure.suptitle(f"{title}\n{subject}", fontsize=11)
    panels = figure.subplots(1, len(rows_of), sharey=True, squeeze=False)[0]
    for panel, (operand, of_operand) in zip(panels, rows_of.items(), strict=True):
        image = _draw_panel(panel, _make_grid(of_operand, places, steps), steps)
        formats = dict.fromkeys(row.format for row in of_operand)
        panel.set_title(f"{operand} ({', '.join(formats)})", fontsize=10)
    labels = [f"{layer} {shorten_module_name(module)}" for layer, module in places]
    panels[0].set_yticks(range(len(places)), labels, fontsize=7)
    panels[0].set_ylabel("layer and module")
    figure.colorbar(image, ax=list(panels), label="dB, 0 is healthy")
    figure.savefig(path, dpi=120)


def _draw_panel(panel: Axes, grid: list[list[float]], steps: Sequence[int]) -> AxesImage:
    """Draw the heat map of one operand, and return it for the colour bar."""
    image = panel.imshow(
        grid, aspect="auto", vmin=-WORST_DB, vmax=0, cmap="cividis", interpolation="nearest"
    )
    interval = max(1, len(steps) // MAX_STEP_LABELS)
    panel.set_xticks(range(0, len(steps), interval), list(map(str, steps[::interval])))
    panel.set_xlabel("step")
    return image


def _make_grid(
    rows: Sequence[QuantisationRow], places: Sequence[Place], steps: Sequence[int]
) -> list[list[float]]:
    """Return the difference from the healthy SQNR, by place and step; NaN if it is not known."""
    difference_at: dict[tuple[int, str, int], float] = {}
    for row in rows:
        if row.format in FORMATS:
            healthy = FORMATS[row.format].healthy_db
            difference_at[row.layer, row.module, row.step] = row.sqnr_db - healthy
    grid = []
    for layer, module in places:
        grid.append([difference_at.get((layer, module, step), math.nan) for step in steps])
    return grid
