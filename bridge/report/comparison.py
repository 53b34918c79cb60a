"""The comparison of a sweep: a table and sentences for the terminal, Markdown, JSON, and the curves as a picture."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.report.curves import figure_of
from bridge.report.table import cell, markdown, show, table
from bridge.runtime.audit.quantisation import OPERANDS
from bridge.runtime.compare.gap import common_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bridge.runtime.compare.comparison import Comparison, RecipeRow

NAME = "comparison"
STATES = {"within": "good", "outside": "bad", "cannot tell": "unknown"}
"""Verdict -> the state of a report's answer."""
LINEAR_GATES = 8
"""Gates up to which the scale of the gaps is linear."""


def show_comparisons(comparisons: Sequence[Comparison]) -> None:
    """Print a table and a verdict per recipe, for each comparison of a sweep."""
    for comparison in comparisons:
        rows = [_cells(row) for row in comparison.rows]
        show(table(rows, title=_title(comparison), numbers={*rows[0]} - {"recipe", "verdict"}))
        print("\n".join(sentences(comparison)))  # noqa: T201  the end of a command


def sentences(comparison: Comparison) -> list[str]:
    """Return the proof that the runs are twins, and the verdict on each recipe."""
    baseline = comparison.baseline
    fields = sorted({name for row in comparison.rows for name in row.differs_in})
    proof = (
        f"Twins: {comparison.equal_fields} fields of the runs are equal, and {len(fields)} fields of precision differ. "
        "Each seed has its own weights and order of the data, the same for every recipe."
    )
    return [proof, *(row.sentence(baseline.label) for row in comparison.rows[1:])]


def answers(comparisons: Sequence[Comparison]) -> dict[Path, dict[str, str]]:
    """Return for each run that has a twin of another recipe a state (good, bad, unknown) and a sentence."""
    found: dict[Path, dict[str, str]] = {}
    for comparison in (one for one in comparisons if len(one.rows) > 1):
        for row, sentence in zip(comparison.rows, sentences(comparison), strict=True):
            state = STATES[row.gap.verdict] if row.gap is not None else "unknown"
            found |= {arm.folder: {"state": state, "sentence": sentence} for arm in row.arms}
    return found


def write_comparisons(folder: Path, comparisons: Sequence[Comparison]) -> None:
    """Write ``comparison.md``, ``comparison.json`` and a picture of each comparison into a folder."""
    parts = []
    for number, comparison in enumerate(comparisons, start=1):
        picture = f"{NAME}.png" if len(comparisons) == 1 else f"{NAME}-{number}.png"
        plot_comparison(folder / picture, comparison)
        parts.append(_markdown(comparison, picture))
    (folder / f"{NAME}.md").write_text("\n".join(parts), encoding="utf-8")
    content = json.dumps([comparison_dict(comparison) for comparison in comparisons], indent=2)
    (folder / f"{NAME}.json").write_text(content + "\n", encoding="utf-8")


def comparison_dict(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain data."""
    rows = [
        {
            "recipe": row.label,
            "gap": dataclasses.asdict(row.gap) if row.gap is not None else None,
            "differs_in": list(row.differs_in),
            "failures": row.failures,
            **row.figures,
            "runs": [str(arm.folder) for arm in row.arms],
        }
        for row in comparison.rows
    ]
    about = {
        "where": dict(comparison.where),
        "gate": comparison.gate,
        "equal_fields": comparison.equal_fields,
    }
    return {**about, "rows": rows}


def _title(comparison: Comparison) -> str:
    where = ", ".join(f"{name}={value}" for name, value in comparison.where.items())
    return f"Compared with {comparison.baseline.label}" + (f", where {where}" if where else "")


def _markdown(comparison: Comparison, picture: str) -> str:
    lines = [f"## {_title(comparison)}", "", markdown([_cells(row) for row in comparison.rows])]
    lines += [
        "",
        *(f"- {sentence}" for sentence in sentences(comparison)),
        "",
        f"![Losses and gaps]({picture})",
        "",
    ]
    return "\n".join(lines)


def _cells(row: RecipeRow) -> dict[str, str]:
    gap, figures = row.gap, row.figures
    memory, errors = figures["peak_memory_bytes"], figures["sqnr_db"]
    interval = "-"
    if gap is not None and gap.low is not None and gap.high is not None:
        interval = f"{100 * gap.low:+.2f} to {100 * gap.high:+.2f} %"
    return {
        "recipe": row.label,
        "verdict": "baseline" if gap is None else gap.verdict,
        "gap": cell(gap.share if gap is not None else None, "+.2%").replace("%", " %"),
        "90 % interval": interval,
        "loss": cell(row.loss),
        "validation": cell(figures["validation_loss"]),
        "seeds": str(len(row.arms)),
        "skipped": str(figures["skipped_steps"]),
        "s/step": cell(figures["step_seconds"], ".3f"),
        "tokens/s": cell(figures["tokens_per_second"], ",.0f"),
        "peak MiB": "-" if memory is None else f"{memory / 2**20:,.0f}",
        "SQNR dB (in, weight, grad)": ", ".join(
            f"{errors[name]:.1f}" for name in OPERANDS if name in errors
        )
        or "-",
    }


def plot_comparison(path: Path, comparison: Comparison) -> None:
    """Draw the losses with the range of their seeds, and below them each gap with its interval, into a PNG."""
    figure = figure_of(9, 7.5)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    gaps = {}
    for number, row in enumerate(comparison.rows):
        _draw_losses(above, row, f"C{number}")
        if row.gap is not None and row.gap.over_steps is not None:
            gaps[f"C{number}"] = points = row.gap.over_steps
            below.plot(
                points.steps, 100 * np.asarray(points.mean), color=f"C{number}", linewidth=1.4
            )
    gate = 100 * comparison.gate
    below.axhspan(-gate, gate, color="tab:gray", alpha=0.15, label=f"gate: {gate:g} %")
    below.margins(y=0.5)
    least, most = below.get_ylim()  # of the means: an interval may be cut
    for colour, points in gaps.items():
        low, high = (100 * np.asarray(values) for values in (points.low, points.high))
        below.fill_between(points.steps, low, high, color=colour, alpha=0.15, linewidth=0)
    windows = [
        row.gap.window
        for row in comparison.rows
        if row.gap is not None and row.gap.window is not None
    ]
    if windows:
        below.axvline(
            windows[0][0],
            color="tab:gray",
            linestyle="--",
            linewidth=1,
            label="judged from here on",
        )
    if max(-least, most) > LINEAR_GATES * gate:  # one recipe far off would flatten the others
        below.set_yscale("symlog", linthresh=gate)
    below.set_ylim(least, most)
    above.set(title="Training loss: mean and range of the seeds", ylabel="nats per token")
    below.set(
        xlabel="step", ylabel=f"gap to {comparison.baseline.label}\n(%, mean and 90 % interval)"
    )
    for axes in (above, below):
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def _draw_losses(axes: Axes, row: RecipeRow, colour: str) -> None:
    steps = common_steps(row.curves)
    if not steps:
        return
    losses = np.stack([curve.over(steps) for curve in row.curves])
    axes.plot(steps, losses.mean(axis=0), color=colour, linewidth=1.4, label=row.label)
    axes.fill_between(
        steps, losses.min(axis=0), losses.max(axis=0), color=colour, alpha=0.15, linewidth=0
    )
