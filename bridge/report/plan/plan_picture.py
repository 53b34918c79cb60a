"""A precision plan as a picture: layers down, GEMMs and tensors across, one colour per format."""

from collections.abc import Collection
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bridge.plan.plan_layers import PlanLayer
from bridge.plan.precision_plan import PrecisionPlan
from bridge.report.curves import make_figure

FORMAT_COLOURS = {
    "fp64": "#3b2a57",
    "fp32": "#6a4c93",
    "fp16": "#4f8fbf",
    "bf16": "#9dc3e0",
    "e5m2": "#f2a541",
    "e4m3": "#5aa469",
    "e2m1": "#d1495b",
    "custom": "#7f7f7f",
}
"""Format -> colour. Wide formats are violet and blue. Narrow formats are orange, green and red."""
FORMAT_TITLES = {
    "e4m3": "FP8 E4M3",
    "e5m2": "FP8 E5M2",
    "e2m1": "FP4 E2M1",
    "custom": "a quantizer factory's",
}
DRAWN_ITEMS = {
    **dict.fromkeys(("linear", "head", "router"), ("fprop", "dgrad", "wgrad", "weight")),
    **dict.fromkeys(("norm", "ssm", "gate"), ("forward",)),
    "attention": ("qk", "pv", "backward"),
    "embedding": ("lookup", "weight"),
    "mixing": ("forward", "fprop", "dgrad", "wgrad"),
}
"""Kind of module -> the GEMMs and tensors that are drawn."""
ROW_HEIGHT = 0.16
COLUMN_WIDTH = 0.2
"""Lengths in the picture, in inches."""
MANY_LAYERS = 40
"""With more layers than this, rows are thinner, so that the picture fits on a page."""
MAX_NAMED_LAYERS = 44
"""Up to this number of layers, every layer is named. With more layers, every fifth is named."""

Column = tuple[str, str] | None
"""(module, item), or the gap between two modules."""


def draw_plan(plan: PrecisionPlan, path: Path) -> None:
    """Write the picture. The suffix of the path chooses the file format: png, svg or pdf."""
    columns, rows = _list_columns(plan), list(plan.layers)
    height = max(0.09, 7.5 / len(rows))
    if len(rows) < MANY_LAYERS:
        height = max(ROW_HEIGHT, 2.6 / len(rows))
    figure = make_figure(2.0 + COLUMN_WIDTH * len(columns), 2.4 + height * len(rows))
    axes = figure.add_subplot()
    formats = _draw_cells(axes, rows, columns)
    _name_columns(axes, columns)
    _name_rows(axes, rows)
    _draw_stages(axes, plan, columns)
    _add_legend(figure, formats)
    low, linears = plan.linears()
    heading = f"{plan.label}: {low} of {linears} linear layers in FP8 or FP4"
    figure.suptitle(heading, x=0.01, ha="left", fontsize=10)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def _add_legend(figure: Figure, formats: Collection[str]) -> None:
    """Add the colours of the formats that occur."""
    patches = []
    for name, colour in FORMAT_COLOURS.items():
        if name in formats:
            patches.append(Patch(color=colour, label=FORMAT_TITLES.get(name, name.upper())))
    figure.legend(
        handles=patches,
        loc="outside lower left",
        title="A cell of two colours multiplies two formats; weight is how it is stored.",
        alignment="left",
        ncols=len(patches),
        frameon=False,
        fontsize=8,
        title_fontsize=7,
    )


def _list_columns(plan: PrecisionPlan) -> list[Column]:
    """Return the columns in the order of the forward pass, with a gap between two modules.

    Layers differ in their modules. If earlier layers do not have a column, it is put before the
    next column of the same layer that they have.
    """
    ordered: list[tuple[str, str]] = []
    for layers, modules in plan.folded():
        drawn: list[tuple[str, str]] = []
        for module in modules:
            for item in DRAWN_ITEMS[module.kind]:
                drawn.append((module.name, item))
        position = len(ordered)
        if layers[0].label == "embedding":
            position = 0
        # From the last to the first, so that the next column of the layer has its position.
        for column in reversed(drawn):
            if column in ordered:
                position = ordered.index(column)
            else:
                ordered.insert(position, column)
    columns: list[Column] = []
    for _, of_module in groupby(ordered, key=itemgetter(0)):
        if columns:
            columns.append(None)
        columns.extend(of_module)
    return columns


def _draw_cells(axes: Axes, rows: list[PlanLayer], columns: list[Column]) -> set[str]:
    """Draw the cells. A GEMM with operands of two formats has a cell with two colours.

    Returns:
        The formats that occur.
    """
    codes = {name: code for code, name in enumerate(FORMAT_COLOURS)}
    unknown = len(codes)
    formats: set[str] = set()
    # Two columns of the mesh are the left and the right half of a cell.
    mesh = np.full((len(rows), 2 * len(columns)), np.nan)
    for y, layer in enumerate(rows):
        format_of = _collect_formats(layer)
        for x, column in enumerate(columns):
            if column is None or column not in format_of:
                continue
            parts = format_of[column].split(" x ")
            formats.update(parts)
            mesh[y, 2 * x] = codes.get(parts[0], unknown)
            mesh[y, 2 * x + 1] = codes.get(parts[-1], unknown)
    x_edges = np.arange(2 * len(columns) + 1) / 2
    y_edges = np.arange(len(rows) + 1)
    colours = ListedColormap([*FORMAT_COLOURS.values(), "#dddddd"])
    axes.pcolormesh(x_edges, y_edges, mesh, cmap=colours, vmin=-0.5, vmax=unknown + 0.5)
    axes.vlines(x_edges[::2], 0, len(rows), color="white", linewidth=1.5)
    axes.hlines(y_edges, 0, len(columns), color="white", linewidth=1)
    axes.set_ylim(len(rows), 0)
    return formats


def _collect_formats(layer: PlanLayer) -> dict[tuple[str, str], str]:
    """Return (module, item) -> the format that its cell shows.

    A weight shows the format in which it is stored.
    """
    format_of: dict[tuple[str, str], str] = {}
    for module in layer.modules:
        for row in module.rows:
            shown = row.format
            if row.item == "weight":
                shown = row.storage
            format_of[module.name, row.item] = shown
    return format_of


def _name_columns(axes: Axes, columns: list[Column]) -> None:
    """Write the item of each column below it, and the module of several columns above them."""
    centres, items, modules = [], [], []
    for x, column in enumerate(columns):
        if column is not None:
            module, item = column
            centres.append(x + 0.5)
            items.append(item)
            modules.append((module, x + 0.5))
    axes.set_xticks(centres, items, rotation=90, fontsize=6)
    for module, of_module in groupby(modules, key=itemgetter(0)):
        middle = fmean(centre for _, centre in of_module)
        axes.text(middle, -0.35, module, rotation=40, ha="left", va="bottom", fontsize=7)


def _name_rows(axes: Axes, rows: list[PlanLayer]) -> None:
    """Write the names of the layers. In a deep model only every fifth layer is named."""
    step = 1
    if len(rows) > MAX_NAMED_LAYERS:
        step = 5
    centres, labels = [], []
    for y, layer in enumerate(rows):
        if layer.number is None or layer.number % step == 0:
            centres.append(y + 0.5)
            labels.append(layer.label)
    axes.set_yticks(centres, labels, fontsize=7)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _draw_stages(axes: Axes, plan: PrecisionPlan, columns: list[Column]) -> None:
    """Draw a line where the next pipeline stage begins, and name several stages."""
    begin = 0
    for (stage, _), layers in groupby(plan.layers, key=lambda layer: (layer.stage, layer.chunk)):
        end = begin + len(list(layers))
        if end < len(plan.layers):
            axes.axhline(end, color="#444444", linewidth=0.5, linestyle=(0, (4, 3)))
        if plan.parallel.pipeline > 1:
            x, y = len(columns) + 0.3, (begin + end) / 2
            axes.text(x, y, f"stage {stage}", fontsize=6, va="center", color="#444444")
        begin = end
