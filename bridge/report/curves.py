"""The loss curves of one run, or of several recipes side by side, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
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


def plot_comparison(path: Path, *, train: Mapping[str, Points], validation: Mapping[str, Points]) -> None:
    """Draw the losses of several runs, and below them their distance from the first, into a PNG.

    Args:
        path: File to write.
        train: Training loss of each run, in nats per token; the first is what the others are compared with.
        validation: Validation loss of each run, at the same steps.
    """
    figure = figure_of(9, 7.5)
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


def figure_of(width: float, height: float) -> Figure:
    """Return an empty figure, its size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy, and only the first rank draws
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
