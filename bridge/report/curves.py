"""The loss curves of one run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

Points = Sequence[tuple[int, float]]
"""(step, loss) pairs."""


def plot_loss(
    path: Path, *, title: str, train: Points, validation: Points = (), unigram_entropy: float | None = None
) -> None:
    """Draw training and validation loss over steps into a PNG; without any point, the axes alone.

    Args:
        path: File to write.
        title: The precision that the run trained in.
        train: Training loss.
        validation: Validation loss.
        unigram_entropy: Loss of the best model without context, in the same unit; drawn as a line across.
    """
    figure = figure_of(8, 4.8)
    axes = figure.add_subplot()
    if train:
        axes.plot(*zip(*train, strict=True), color="tab:blue", linewidth=1.2, label="training")
    if validation:
        axes.plot(*zip(*validation, strict=True), color="tab:orange", marker="o", markersize=4, label="validation")
    if unigram_entropy is not None:
        axes.axhline(unigram_entropy, color="tab:gray", linestyle="--", linewidth=1, label="unigram entropy")
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    axes.grid(visible=True, alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(path, dpi=120)


def figure_of(width: float, height: float) -> Figure:
    """Return an empty figure, its size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy, and only the first rank draws
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
