"""The loss curves of one run as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = Sequence[tuple[int, float]]
"""(step, loss) pairs."""


def points(records: Sequence[Mapping[str, Any]], name: str) -> Points:
    """Return step and value of each record of a run that has the value."""
    return [(one["step"], one[name]) for one in records if one[name] is not None]


def plot_loss(
    path: Path,
    *,
    title: str,
    train: Points,
    validation: Points = (),
    loss_scale: Points = (),
    unigram_entropy: float | None = None,
) -> None:
    """Draw training and validation loss over steps into a PNG; without any point, the axes alone."""
    figure = figure_of(8, 6.2 if loss_scale else 4.8)
    axes = None if loss_scale else figure.add_subplot()
    if axes is None:
        axes, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
        below.step(*zip(*loss_scale, strict=True), where="post", color="tab:green", linewidth=1.2)
        below.set_yscale("log", base=2)
        below.set(xlabel="step", ylabel="loss scale")
        below.grid(visible=True, alpha=0.3)
    if train:
        axes.plot(*zip(*train, strict=True), color="tab:blue", linewidth=1.2, label="training")
    if validation:
        axes.plot(
            *zip(*validation, strict=True),
            color="tab:orange",
            marker="o",
            markersize=4,
            label="validation",
        )
    if unigram_entropy is not None:
        axes.axhline(
            unigram_entropy, color="tab:gray", linestyle="--", linewidth=1, label="unigram entropy"
        )
    axes.set(title=title, xlabel="" if loss_scale else "step", ylabel="loss (nats per token)")
    axes.grid(visible=True, alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(path, dpi=120)


def figure_of(width: float, height: float) -> Figure:
    """Return an empty figure, its size in inches."""
    from matplotlib.backends.backend_agg import (
        FigureCanvasAgg,
    )  # heavy, and only the first rank draws
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
