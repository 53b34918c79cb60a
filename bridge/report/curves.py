"""The loss curves of one run as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[int, float]]
"""(step, loss) pairs."""


def collect_points(records: Sequence[Mapping[str, Any]], name: str) -> Points:
    """Return the step and the value of each record that has the value."""
    return [(row["step"], row[name]) for row in records if row[name] is not None]


def plot_loss(
    path: Path,
    *,
    title: str,
    train: Points,
    validation: Points = (),
    loss_scale: Points = (),
    unigram_entropy: float | None = None,
) -> None:
    """Draw training and validation loss over steps into a PNG. Without points, the axes are empty.

    Args:
        path: The file.
        title: The title of the picture.
        train: The training losses.
        validation: The validation losses.
        loss_scale: The loss scales, which get separate axes below. Empty: no such axes.
        unigram_entropy: The loss of a model that knows only token frequencies. None: no line.
    """
    height, xlabel = 4.8, "step"
    if loss_scale:
        height, xlabel = 6.2, ""
    figure = make_figure(8, height)
    if loss_scale:
        axes, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
        _draw_loss_scale(below, loss_scale)
    else:
        axes = figure.add_subplot()
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color="tab:blue", linewidth=1.2, label="training")
    if validation:
        steps, losses = zip(*validation, strict=True)
        style: dict[str, Any] = {"color": "tab:orange", "marker": "o", "markersize": 4}
        axes.plot(steps, losses, label="validation", **style)
    if unigram_entropy is not None:
        label = "unigram entropy"
        axes.axhline(unigram_entropy, color="tab:gray", linestyle="--", linewidth=1, label=label)
    axes.set(title=title, xlabel=xlabel, ylabel="loss (nats per token)")
    axes.grid(visible=True, alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(path, dpi=120)


def _draw_loss_scale(axes: Axes, loss_scale: Points) -> None:
    """Draw the loss scale in steps, since it changes by factors."""
    steps, scales = zip(*loss_scale, strict=True)
    axes.step(steps, scales, where="post", color="tab:green", linewidth=1.2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="step", ylabel="loss scale")
    axes.grid(visible=True, alpha=0.3)


def make_figure(width: float, height: float) -> Figure:
    """Return an empty figure.

    Args:
        width: Inches.
        height: Inches.
    """
    # matplotlib takes a second to import, and only the first rank draws.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
