"""The losses and the gaps of a comparison as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bridge.report.curves import make_figure
from bridge.runtime.compare.gap import find_common_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bridge.runtime.compare.comparison import Comparison, RecipeRow

MAX_LINEAR_GATES = 8
"""The scale of the gaps is linear up to this multiple of the gate."""


def plot_comparison(path: Path, comparison: Comparison) -> None:
    """Draw the losses with the range of their seeds, and below them each gap, into a PNG."""
    figure = make_figure(9, 7.5)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for number, row in enumerate(comparison.rows):
        _draw_losses(above, row, f"C{number}")
    title = "Training loss"
    if any(len(row.arms) > 1 for row in comparison.rows):
        title = "Training loss: mean and range of the seeds"
    above.set(title=title, ylabel="nats per token")
    _draw_gaps(below, comparison)
    for axes in (above, below):
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def _draw_losses(axes: Axes, row: RecipeRow, colour: str) -> None:
    """Draw the mean of the losses of all seeds, and their range as a band."""
    steps = find_common_steps(row.curves)
    if not steps:
        return
    losses = np.stack([curve.average_losses(steps) for curve in row.curves])
    least, most = losses.min(axis=0), losses.max(axis=0)
    axes.plot(steps, losses.mean(axis=0), color=colour, linewidth=1.4, label=row.label)
    axes.fill_between(steps, least, most, color=colour, alpha=0.15, linewidth=0)


def _draw_gaps(axes: Axes, comparison: Comparison) -> None:
    """Draw each gap with its interval, the gate, and the step from which the gaps are judged."""
    points_of = {}
    windows = []
    for number, row in enumerate(comparison.rows):
        if row.gap is None:
            continue
        if row.gap.window is not None:
            windows.append(row.gap.window)
        points = row.gap.over_steps
        if points is not None:
            colour = f"C{number}"
            points_of[colour] = points
            axes.plot(points.steps, 100 * np.asarray(points.mean), color=colour, linewidth=1.4)
    gate = 100 * comparison.gate
    axes.axhspan(-gate, gate, color="tab:gray", alpha=0.15, label=f"gate: {gate:g} %")
    axes.margins(y=0.5)
    # The limits come from the means. A wide interval is cut, so that the means stay readable.
    least, most = axes.get_ylim()
    for colour, points in points_of.items():
        low, high = 100 * np.asarray(points.low), 100 * np.asarray(points.high)
        axes.fill_between(points.steps, low, high, color=colour, alpha=0.15, linewidth=0)
    if windows:
        first_step = windows[0][0]
        label = "judged from here on"
        axes.axvline(first_step, color="tab:gray", linestyle="--", linewidth=1, label=label)
    # On a linear scale, one recipe far from the gate would flatten the curves of the others.
    if max(-least, most) > MAX_LINEAR_GATES * gate:
        axes.set_yscale("symlog", linthresh=gate)
    axes.set_ylim(least, most)
    ylabel = f"gap to {comparison.baseline.label}\n(%, mean and 90 % interval)"
    axes.set(xlabel="step", ylabel=ylabel)
