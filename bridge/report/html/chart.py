"""Line charts as SVG, which needs no script and no network: axes, a legend in the markup, colours from the page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Point = tuple[float, float]

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 36
MOST_POINTS = 400
TICKS = 5
COLOURS = 6
"""Classes s0 to s5 of the page's style; further lines are dashed in the same colours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of a chart."""

    name: str
    points: Sequence[Point]
    """(x, y), x increasing; values that are not finite are left out."""


def line_chart(lines: Sequence[Line], *, title: str, x: str, y: str, log: bool = False) -> str:
    """Return a chart as an SVG element that names its content for a screen reader.

    A logarithmic vertical axis has the base 2, and leaves out values that are not positive.
    """
    shown = [(line.name, _thinned(_usable(line.points, log=log))) for line in lines]
    shown = [(name, points) for name, points in shown if points]
    if not shown:
        return ""
    xs = [point[0] for _, points in shown for point in points]
    ys = [point[1] for _, points in shown for point in points]
    x_range, y_range = _widened(min(xs), max(xs)), _widened(min(ys), max(ys))

    def place(point: Point) -> Point:
        across = (point[0] - x_range[0]) / (x_range[1] - x_range[0])
        up = (point[1] - y_range[0]) / (y_range[1] - y_range[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [*_grid(x_range, y_range, place, log=log)]
    for number, (_, points) in enumerate(shown):
        path = " ".join(f"{across:.1f},{down:.1f}" for across, down in map(place, points))
        parts.append(f'<polyline class="line {_style(number)}" points="{path}"/>')
    middle = (LEFT + WIDTH) // 2
    parts.append(f'<text class="axis" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x)}</text>')
    ends = [f"{name} from {_plain(line[0][1], log)} to {_plain(line[-1][1], log)}" for name, line in shown]
    label = escape(f"{title}, {y} by {x}: {'; '.join(ends)}", quote=True)
    keys = [f'<span class="key {_style(number)}"></span>{escape(name)}' for number, (name, _) in enumerate(shown)]
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    legend = "".join(f"<li>{key}</li>" for key in keys)
    caption = f"<figcaption>{escape(title)} <small>({escape(y)})</small></figcaption>"
    return f'<figure class="chart">{caption}{svg}<ul class="legend">{legend}</ul></figure>'


def _style(number: int) -> str:
    """Return the classes of a line: its colour, and dashes for lines beyond the last colour."""
    return f"s{number % COLOURS}{' dashed' * (number >= COLOURS)}"


def _usable(points: Sequence[Point], *, log: bool) -> list[Point]:
    finite = [(a, b) for a, b in points if math.isfinite(a) and math.isfinite(b)]
    return [(a, math.log2(b)) for a, b in finite if b > 0] if log else finite


def _thinned(points: list[Point]) -> list[Point]:
    """Return at most `MOST_POINTS` of the points, the first and the last included."""
    if len(points) <= MOST_POINTS:
        return points
    step = (len(points) - 1) / (MOST_POINTS - 1)
    return [points[round(index * step)] for index in range(MOST_POINTS)]


def _widened(low: float, high: float) -> Point:
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _grid(x_range: Point, y_range: Point, place: Callable[[Point], Point], *, log: bool) -> Iterator[str]:
    """Yield lines and numbers of the vertical axis, and the numbers at the ends of the horizontal one."""
    for index in range(TICKS):
        value = y_range[0] + (y_range[1] - y_range[0]) * index / (TICKS - 1)
        left, height = place((x_range[0], value))
        yield f'<line class="grid" x1="{left:.1f}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>'
        yield f'<text class="axis" x="{LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{_plain(value, log)}</text>'
    for value, anchor in zip(x_range, ("start", "end"), strict=True):
        across, _ = place((value, y_range[0]))
        height = HEIGHT - BOTTOM + 16
        yield f'<text class="axis" x="{across:.1f}" y="{height}" text-anchor="{anchor}">{value:,.0f}</text>'


def _plain(value: float, is_log: bool) -> str:
    return f"{2**value:.4g}" if is_log else f"{value:.4g}"
