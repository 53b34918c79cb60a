"""Loss curves of several recipes, and the distance of each from the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from bridge.report.curves import Points

__all__ = ["plot_comparison"]


def plot_comparison(path: Path, *, train: Mapping[str, Points], validation: Mapping[str, Points]) -> None:
    """Draw the losses of several runs, and below them their distance from the first, into a PNG.

    Args:
        path: File to write.
        train: Training loss of each run, in nats per token; the first is what the others are compared with.
        validation: Validation loss of each run, at the same steps.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    reference = dict(next(iter(validation.values())))
    for number, (name, points) in enumerate(train.items()):
        colour = f"C{number}"
        above.plot(*zip(*points, strict=True), color=colour, linewidth=1, alpha=0.5)
        above.plot(*zip(*validation[name], strict=True), color=colour, marker="o", markersize=4, label=name)
        distance = [(step, 100 * (loss / reference[step] - 1)) for step, loss in validation[name] if step in reference]
        below.plot(*zip(*distance, strict=True), color=colour, marker="o", markersize=4)
    above.set(title="Training (thin) and validation loss", ylabel="nats per token")
    above.legend(fontsize=8)
    below.set(xlabel="step", ylabel=f"validation loss against\n{next(iter(validation))} (%)")
    below.axhspan(-1, 1, color="tab:gray", alpha=0.15)
    below.set_yscale("symlog", linthresh=1)
    for axes in (above, below):
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=110)
