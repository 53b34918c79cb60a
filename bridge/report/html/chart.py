"""Line charts as SVG, drawn by matplotlib, for the HTML page.

The charts need neither a script nor a network. The legend is in the markup, and the colours come
from the page.
"""

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from bridge.report.curves import make_figure

Point = tuple[float, float]

MAX_POINTS = 400
"""The most points of a line. More points would not be visible on a page."""
_LINES = ("#0000a0", "#0000a1", "#0000a2", "#0000a3", "#0000a4", "#0000a5")
COLOUR_COUNT = len(_LINES)
"""The number of colours: the classes s0, s1, ... of the page. Further lines are dashed."""
_TEXT, _GRID = "#0000b0", "#0000b1"
_PAGE_COLOURS = {_TEXT: "var(--soft)", _GRID: "var(--rule)"}
for _number, _line in enumerate(_LINES):
    _PAGE_COLOURS[_line] = f"var(--s{_number})"
"""Placeholder colour that matplotlib draws with -> the page's variable, which dark mode changes."""


def draw_line_chart(
    lines: Mapping[str, Sequence[Point]], *, title: str, unit: str, log: bool = False
) -> str:
    """Return a chart over steps as an SVG element in a figure.

    The element has a text for screen readers. Values that are not finite are left out. So are
    values that are not positive, if the axis is logarithmic.

    Args:
        lines: Name -> (step, value) pairs in the order of the steps.
        title: The caption.
        unit: The unit of the values.
        log: Whether the axis of the values is logarithmic.

    Returns:
        The element; "" if there are fewer than two steps.
    """
    shown: dict[str, list[Point]] = {}
    steps: set[float] = set()
    for name, points in lines.items():
        thinned = _thin_points(points, log=log)
        if thinned:
            shown[name] = thinned
            steps |= {step for step, _ in thinned}
    if len(steps) < 2:
        return ""
    ends = []
    for name, points in shown.items():
        ends.append(f"{name} from {points[0][1]:.4g} to {points[-1][1]:.4g}")
    label = escape(f"{title}, {unit} by step: {'; '.join(ends)}", quote=True)
    head = (
        f'<svg viewBox="0 0 460.8 187.2" role="img" aria-label="{label}">'
        f"<title>{escape(title)}</title>"
    )
    svg = _draw_svg([*shown.values()], log=log)
    caption = f"<figcaption>{escape(title)} <small>({escape(unit)})</small></figcaption>"
    legend = f'<ul class="legend">{_format_legend(shown)}</ul>'
    return f'<figure class="chart">{caption}{head}{svg}{legend}</figure>'


def _format_legend(names: Iterable[str]) -> str:
    """Return the items of a legend, in the order of the lines."""
    items = []
    for number, name in enumerate(names):
        style = f"s{number % COLOUR_COUNT}"
        if number >= COLOUR_COUNT:
            style += " dashed"
        items.append(f'<li><span class="key {style}"></span>{escape(name)}</li>')
    return "".join(items)


def _draw_svg(curves: Sequence[Sequence[Point]], *, log: bool) -> str:
    """Return the content and the end tag of an SVG element with the curves."""
    figure = make_figure(6.4, 2.6)
    axes = figure.add_subplot()
    values: list[float] = []
    for number, points in enumerate(curves):
        style = "-"
        if number >= COLOUR_COUNT:
            style = "--"
        steps, heights = zip(*points, strict=True)
        values.extend(heights)
        colour = _LINES[number % COLOUR_COUNT]
        # Without clip_on=False, clip paths get ids, and two charts of a page may have the same id.
        axes.plot(steps, heights, linestyle=style, linewidth=1.5, color=colour, clip_on=False)
    if log:
        axes.set_yscale("log")
        axes.minorticks_off()
    if log and max(values) > 10 * min(values):
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlabel("step", color=_TEXT)
    axes.tick_params(length=0, labelcolor=_TEXT)
    axes.grid(axis="y", color=_GRID, clip_on=False)
    axes.spines[:].set_visible(False)
    return _export_svg(figure)


def _export_svg(figure: Figure) -> str:
    """Return a figure as the content and the end tag of an SVG element, in the page's colours."""
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=no_metadata)
    # The caller writes the start tag, so that the element has a title and no fixed size.
    svg = text.getvalue().partition("<svg")[2].partition(">")[2]
    # Styles would affect the whole page, and two charts would have the same ids.
    svg = re.sub(r'<style.*?</style>| id="[\w.]+_\d+"', "", svg, flags=re.DOTALL)
    return re.sub("|".join(_PAGE_COLOURS), lambda match: _PAGE_COLOURS[match[0]], svg)


def _thin_points(points: Sequence[Point], *, log: bool) -> list[Point]:
    """Return at most `MAX_POINTS` of the points that can be drawn, with the first and the last."""
    drawn = []
    for step, value in points:
        if math.isfinite(step + value) and (value > 0 or not log):
            drawn.append((step, value))
    count = min(len(drawn), MAX_POINTS)
    thinned = []
    for index in range(count):
        thinned.append(drawn[index * (len(drawn) - 1) // max(1, count - 1)])
    return thinned
