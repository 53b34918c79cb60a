"""A precision plan as a picture: layers down, GEMMs and tensors across, one colour per format."""

from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from bridge.plan.precision_plan import PlanLayer, PrecisionPlan
from bridge.report.curves import figure_of

COLOURS = {
    "fp64": "#3b2a57",
    "fp32": "#6a4c93",
    "fp16": "#4f8fbf",
    "bf16": "#9dc3e0",
    "e5m2": "#f2a541",
    "e4m3": "#5aa469",
    "e2m1": "#d1495b",
    "custom": "#7f7f7f",
}
"""Format -> colour; wide formats are violet and blue, narrow ones warm or green."""
TITLES = {
    "e4m3": "FP8 E4M3",
    "e5m2": "FP8 E5M2",
    "e2m1": "FP4 E2M1",
    "custom": "a quantizer factory's",
}
ITEMS = {
    **dict.fromkeys(("linear", "head", "router"), ("fprop", "dgrad", "wgrad", "weight")),
    **dict.fromkeys(("norm", "ssm", "gate"), ("forward",)),
    "attention": ("qk", "pv", "backward"),
    "embedding": ("lookup", "weight"),
    "mixing": ("forward", "fprop", "dgrad", "wgrad"),
}
"""Kind of module -> the GEMMs and tensors that are drawn."""
ROW_HEIGHT = 0.16
COLUMN_WIDTH = 0.2

Column = tuple[str, str] | None
"""(module, item), or the gap between two modules."""


def draw_plan(plan: PrecisionPlan, path: Path) -> None:
    """Write the picture; the suffix of the path chooses the format (png, svg, pdf)."""
    columns, rows = _columns(plan), list(plan.layers)
    height = max(ROW_HEIGHT, 2.6 / len(rows)) if len(rows) < 40 else max(0.09, 7.5 / len(rows))
    figure = figure_of(2.0 + COLUMN_WIDTH * len(columns), 2.4 + height * len(rows))
    axes = figure.add_subplot()
    formats = _draw_cells(axes, rows, columns)
    _label(axes, plan, rows, columns)
    patches = [
        Patch(color=COLOURS[name], label=TITLES.get(name, name.upper()))
        for name in COLOURS
        if name in formats
    ]
    title = "A cell of two colours multiplies two formats; weight is how it is stored."
    style: dict[str, Any] = {
        "ncols": len(patches),
        "frameon": False,
        "fontsize": 8,
        "title_fontsize": 7,
    }
    figure.legend(handles=patches, loc="outside lower left", title=title, alignment="left", **style)
    low, linears = plan.linears()
    figure.suptitle(
        f"{plan.label}: {low} of {linears} linear layers in FP8 or FP4",
        x=0.01,
        ha="left",
        fontsize=10,
    )
    figure.savefig(path, dpi=120, bbox_inches="tight")


def _columns(plan: PrecisionPlan) -> list[Column]:
    """Return everything that is drawn, in the order in which the forward pass meets it."""
    ahead: list[tuple[str, str]] = []
    for layers, modules in plan.folded():
        mine = [(module.name, item) for module in modules for item in ITEMS[module.kind]]
        place = 0 if layers[0].label == "embedding" else len(ahead)
        for column in reversed(mine):  # a new column goes before the known one behind it
            if column in ahead:
                place = ahead.index(column)
            else:
                ahead.insert(place, column)
    apart = [[None, *own] for _, own in groupby(ahead, key=lambda column: column[0])]
    return [column for own in apart for column in own][1:]


def _draw_cells(axes: Axes, rows: list[PlanLayer], columns: list[Column]) -> set[str]:
    """Draw the cells, in two colours where a GEMM multiplies two formats, and return the formats that occur."""
    codes = {name: code for code, name in enumerate(COLOURS)}
    formats: set[str] = set()
    mesh = np.full(
        (len(rows), 2 * len(columns)), np.nan
    )  # the left and the right half of each cell
    for y, layer in enumerate(rows):
        found = {(module.name, row.item): row for module in layer.modules for row in module.rows}
        for x, column in enumerate(columns):
            row = None if column is None else found.get(column)
            if row is not None:
                parts = (row.storage if row.item == "weight" else row.format).split(" x ")
                formats.update(parts)
                mesh[y, 2 * x : 2 * x + 2] = [
                    codes.get(part, len(codes)) for part in (parts[0], parts[-1])
                ]
    edges, colours = (
        np.arange(2 * len(columns) + 1) / 2,
        ListedColormap([*COLOURS.values(), "#dddddd"]),
    )
    axes.pcolormesh(
        edges, np.arange(len(rows) + 1), mesh, cmap=colours, vmin=-0.5, vmax=len(codes) + 0.5
    )
    axes.vlines(edges[::2], 0, len(rows), color="white", linewidth=1.5)
    axes.hlines(np.arange(len(rows) + 1), 0, len(columns), color="white", linewidth=1)
    axes.set_ylim(len(rows), 0)
    return formats


def _label(axes: Axes, plan: PrecisionPlan, rows: list[PlanLayer], columns: list[Column]) -> None:
    """Name the layers, items and modules, and draw a line where the next pipeline stage begins."""
    shown = [(x + 0.5, *column) for x, column in enumerate(columns) if column is not None]
    axes.set_xticks(
        [x for x, _, _ in shown], [item for _, _, item in shown], rotation=90, fontsize=6
    )
    for module, own in groupby(shown, key=lambda one: one[1]):
        middle = fmean(x for x, _, _ in own)
        axes.text(middle, -0.35, module, rotation=40, ha="left", va="bottom", fontsize=7)
    step = 1 if len(rows) <= 44 else 5
    ticks = [y for y, layer in enumerate(rows) if layer.number is None or layer.number % step == 0]
    axes.set_yticks([y + 0.5 for y in ticks], [rows[y].label for y in ticks], fontsize=7)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    begin = 0
    for (stage, _), held in groupby(rows, key=lambda row: (row.stage, row.chunk)):
        end = begin + len(list(held))
        if end < len(rows):
            axes.axhline(end, color="#444444", linewidth=0.5, linestyle=(0, (4, 3)))
        if plan.parallel.pipeline > 1:
            place = len(columns) + 0.3, (begin + end) / 2
            axes.text(*place, f"stage {stage}", fontsize=6, va="center", color="#444444")
        begin = end
