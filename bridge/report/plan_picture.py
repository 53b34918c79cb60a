"""A precision plan as a picture: layers down, GEMMs and tensors across, one colour per format."""

from itertools import groupby
from pathlib import Path

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
TITLES = {"e4m3": "FP8 E4M3", "e5m2": "FP8 E5M2", "e2m1": "FP4 E2M1", "custom": "a quantizer factory's"}
ITEMS = {
    "linear": ("fprop", "dgrad", "wgrad", "weight"),
    "head": ("fprop", "dgrad", "wgrad", "weight"),
    "router": ("fprop", "dgrad", "wgrad", "weight"),
    "attention": ("qk", "pv", "backward"),
    "norm": ("forward",),
    "ssm": ("forward",),
    "gate": ("forward",),
    "embedding": ("lookup", "weight"),
}
"""Kind of module -> the GEMMs and tensors that are drawn."""
ROW_HEIGHT = 0.16
COLUMN_WIDTH = 0.2


def draw_plan(plan: PrecisionPlan, path: Path) -> None:
    """Write the picture; the suffix of the path chooses the format (png, svg, pdf)."""
    columns = _columns(plan)
    rows = list(plan.layers)
    height = max(ROW_HEIGHT, 2.6 / len(rows)) if len(rows) < 40 else max(0.09, 7.5 / len(rows))
    size = (2.0 + COLUMN_WIDTH * len(columns) + 0.12 * len({module for module, _ in columns}), 2.4 + height * len(rows))
    figure = figure_of(*size)
    axes = figure.add_subplot()
    formats = _draw_cells(axes, rows, columns)
    _label(axes, plan, rows, columns)
    patches = [
        Patch(color=colour, label=TITLES.get(name, name.upper())) for name, colour in COLOURS.items() if name in formats
    ]
    title = "A cell of two colours multiplies two formats; weight is how it is stored."
    legend = figure.legend(
        handles=patches, loc="outside lower left", ncols=len(patches), frameon=False, fontsize=8, title=title
    )
    legend.set_alignment("left")
    legend.get_title().set_fontsize(7)
    low, linears = plan.linears()
    figure.suptitle(f"{plan.label}: {low} of {linears} linear layers in FP8 or FP4", x=0.01, ha="left", fontsize=10)
    figure.savefig(path, dpi=120, bbox_inches="tight")


Column = tuple[str, str]


def _columns(plan: PrecisionPlan) -> list[Column]:
    """Return (module, item) of everything that is drawn, in the order in which the forward pass meets it."""
    ahead: list[Column] = []
    for layers, modules in plan.folded():
        mine = [(module.name, item) for module in modules for item in ITEMS[module.kind]]
        place = 0 if layers[0].label == "embedding" else len(ahead)
        for column in reversed(mine):  # a new column goes before the known one behind it
            if column in ahead:
                place = ahead.index(column)
            else:
                ahead.insert(place, column)
    return ahead


def _positions(columns: list[Column]) -> list[float]:
    """Return where each column begins, with a gap between modules."""
    positions: list[float] = []
    x = 0.0
    for index, (module, _) in enumerate(columns):
        if index and columns[index - 1][0] != module:
            x += 0.6
        positions.append(x)
        x += 1.0
    return positions


def _draw_cells(axes: Axes, rows: list[PlanLayer], columns: list[Column]) -> set[str]:
    """Draw the cells, in two colours where a GEMM multiplies two formats, and return the formats that occur."""
    positions = _positions(columns)
    codes = {name: code for code, name in enumerate(COLOURS)}
    formats: set[str] = set()
    # Each column is its left half, its right half and the gap behind it; each row is its cells and the gap below.
    mesh = np.full((2 * len(rows), 3 * len(columns)), np.nan)
    for y, layer in enumerate(rows):
        modules = {module.name: module for module in layer.modules}
        for x, (name, item) in enumerate(columns):
            row = modules[name].row(item) if name in modules else None
            if row is not None:
                parts = (row.storage if item == "weight" else row.format).split(" x ")
                formats.update(parts)
                mesh[2 * y, 3 * x : 3 * x + 2] = [codes.get(part, len(codes)) for part in (parts[0], parts[-1])]
    across = [x + edge for x in positions for edge in (0.05, 0.5, 0.95)] + [positions[-1] + 1]
    down = [y + edge for y in range(len(rows)) for edge in (0.06, 0.94)] + [len(rows)]
    colours = ListedColormap([*COLOURS.values(), "#dddddd"])
    axes.pcolormesh(across, down, np.ma.masked_invalid(mesh), cmap=colours, vmin=-0.5, vmax=len(codes) + 0.5)
    axes.set_xlim(-0.3, positions[-1] + 1.3)
    axes.set_ylim(len(rows), 0)
    return formats


def _label(axes: Axes, plan: PrecisionPlan, rows: list[PlanLayer], columns: list[Column]) -> None:
    positions = _positions(columns)
    axes.set_xticks([x + 0.5 for x in positions], [item for _, item in columns], rotation=90, fontsize=6)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for name in dict.fromkeys(module for module, _ in columns):
        own = [x for x, (module, _) in zip(positions, columns, strict=True) if module == name]
        axes.text((own[0] + own[-1] + 1) / 2, -0.35, name, rotation=40, ha="left", va="bottom", fontsize=7)
    step = 1 if len(rows) <= 44 else 5
    ticks = [y for y, layer in enumerate(rows) if layer.number is None or layer.number % step == 0]
    axes.set_yticks([y + 0.5 for y in ticks], [rows[y].label for y in ticks], fontsize=7)
    _mark_stages(axes, plan, rows, positions[-1] + 1)


def _mark_stages(axes: Axes, plan: PrecisionPlan, rows: list[PlanLayer], right: float) -> None:
    """Draw a line where the next pipeline stage begins, and its number at the right."""
    if plan.parallel.pipeline == 1:
        return
    begin = 0
    for (stage, _), held in groupby(rows, key=lambda row: (row.stage, row.chunk)):
        end = begin + len(list(held))
        if end < len(rows):
            axes.axhline(end, color="#444444", linewidth=0.5, linestyle=(0, (4, 3)))
        axes.text(right + 0.3, (begin + end) / 2, f"stage {stage}", fontsize=6, va="center", color="#444444")
        begin = end
