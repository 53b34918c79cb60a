"""Line charts as SVG, drawn by matplotlib: no script, no network, a legend in the markup, colours from the page."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from html import escape

from matplotlib import rc_context
from matplotlib.ticker import LogLocator, MaxNLocator

from bridge.report.curves import figure_of

Point = tuple[float, float]

MOST_POINTS = 400
COLOURS = 6
"""Classes s0 to s5 of the page's style; further lines are dashed in the same colours."""
_LINES = [f"#0000a{number}" for number in range(COLOURS)]
_TEXT, _GRID = "#0000b0", "#0000b1"
_OF_PAGE = {_TEXT: "var(--soft)", _GRID: "var(--rule)"} | {
    name: f"var(--s{n})" for n, name in enumerate(_LINES)
}
"""Colour that matplotlib draws with -> the page's, which is another one in the dark."""


def line_chart(
    lines: Mapping[str, Sequence[Point]], *, title: str, y: str, log: bool = False
) -> str:
    """Return a chart over steps as an SVG element that names its content for a screen reader; "" for a single step.

    `lines` are name -> (step, value) pairs in order. Values that are not finite are left out, and on a logarithmic axis
    those that are not positive. `y` is their unit.
    """
    shown = {name: _thinned(points, log=log) for name, points in lines.items()}
    shown = {name: points for name, points in shown.items() if points}
    if len({step for points in shown.values() for step, _ in points}) < 2:
        return ""
    ends = [
        f"{name} from {points[0][1]:.4g} to {points[-1][1]:.4g}" for name, points in shown.items()
    ]
    label = escape(f"{title}, {y} by step: {'; '.join(ends)}", quote=True)
    head = f'<svg viewBox="0 0 460.8 187.2" role="img" aria-label="{label}"><title>{escape(title)}</title>'
    svg = _drawn([*shown.values()], log=log)
    styles = (
        f"s{number % COLOURS}{' dashed' * (number >= COLOURS)}" for number in range(len(shown))
    )
    keys = zip(styles, map(escape, shown), strict=True)
    legend = "".join(f'<li><span class="key {style}"></span>{name}</li>' for style, name in keys)
    caption = f"<figcaption>{escape(title)} <small>({escape(y)})</small></figcaption>"
    return f'<figure class="chart">{caption}{head}{svg}<ul class="legend">{legend}</ul></figure>'


def _drawn(curves: Sequence[Sequence[Point]], *, log: bool) -> str:
    figure = figure_of(6.4, 2.6)
    axes = figure.add_subplot()
    for number, points in enumerate(curves):
        style = "--" if number >= COLOURS else "-"
        colour = _LINES[
            number % COLOURS
        ]  # a clip would have an id, and those of two charts could be the same
        axes.plot(
            *zip(*points, strict=True), color=colour, linestyle=style, linewidth=1.5, clip_on=False
        )
    values = [value for points in curves for _, value in points]
    if log:
        axes.set_yscale("log")
        axes.minorticks_off()
    is_wide = log and max(values) > 10 * min(values)
    axes.yaxis.set_major_locator(
        LogLocator(numticks=6) if is_wide else MaxNLocator(5, steps=[1, 2, 5, 10])
    )
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlabel("step", color=_TEXT)
    axes.tick_params(length=0, labelcolor=_TEXT)
    axes.grid(axis="y", color=_GRID, clip_on=False)
    axes.spines[:].set_visible(False)
    out = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    svg = out.getvalue().partition("<svg")[2].partition(">")[2]
    svg = re.sub(r'<style.*?</style>| id="[\w.]+_\d+"', "", svg, flags=re.DOTALL)
    return re.sub("|".join(_OF_PAGE), lambda found: _OF_PAGE[found[0]], svg)


def _thinned(points: Sequence[Point], *, log: bool) -> list[Point]:
    """Return at most `MOST_POINTS` of the points that can be drawn, the first and the last included."""
    drawn = [one for one in points if math.isfinite(sum(one)) and (one[1] > 0 or not log)]
    count = min(len(drawn), MOST_POINTS)
    return [drawn[index * (len(drawn) - 1) // max(1, count - 1)] for index in range(count)]
