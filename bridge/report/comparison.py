"""The comparison of a sweep, for a terminal and as files.

The terminal gets a table and sentences; the files are Markdown, JSON, and the curves as a picture.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.report.curves import make_figure
from bridge.report.table import format_cell, format_markdown, make_table, print_renderable
from bridge.runtime.audit.quantisation import OPERANDS
from bridge.runtime.compare.gap import find_common_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bridge.runtime.compare.comparison import Comparison, RecipeRow

FILE_STEM = "comparison"
VERDICT_STATES = {"within": "good", "outside": "bad", "cannot tell": "unknown"}
"""Verdict -> the state of a report's answer."""
MAX_LINEAR_GATES = 8
"""Gates up to which the scale of the gaps is linear."""


def print_comparisons(comparisons: Sequence[Comparison]) -> None:
    """Print a table and a verdict per recipe, for each comparison of a sweep."""
    for comparison in comparisons:
        rows = _make_rows(comparison)
        numbers = {*rows[0]} - {"recipe", "verdict"}
        print_renderable(make_table(rows, title=_format_title(comparison), numbers=numbers))
        print("\n".join(format_sentences(comparison)))  # noqa: T201  the end of a command


def format_sentences(comparison: Comparison) -> list[str]:
    """Return how far the runs are twins, and the verdict on each recipe."""
    lines = list(comparison.notes) or [_format_proof(comparison)]
    for row in comparison.rows[1:]:
        lines.append(row.sentence(comparison.baseline.label))
    return lines


def _format_proof(comparison: Comparison) -> str:
    """Return the proof that runs of our own are twins."""
    fields: set[str] = set()
    for row in comparison.rows:
        fields.update(row.differs_in)
    return (
        f"Twins: {comparison.equal_fields} fields of the runs are equal, and {len(fields)} fields "
        "of precision differ. Each seed has its own weights and order of the data, the same for "
        "every recipe."
    )


def collect_answers(comparisons: Sequence[Comparison]) -> dict[Path, dict[str, str]]:
    """Return for each run that has a twin of another recipe a state and a sentence.

    A state is good, bad or unknown. The runs of the baseline have what is known of all of them.
    """
    answer_of: dict[Path, dict[str, str]] = {}
    for comparison in comparisons:
        if len(comparison.rows) < 2:
            continue
        about_all = " ".join(comparison.notes) or _format_proof(comparison)
        for row in comparison.rows:
            state, sentence = "unknown", about_all
            if row.gap is not None:
                state, sentence = (
                    VERDICT_STATES[row.gap.verdict],
                    row.sentence(comparison.baseline.label),
                )
            for arm in row.arms:
                answer_of[arm.folder] = {"state": state, "sentence": sentence}
    return answer_of


def write_comparisons(folder: Path, comparisons: Sequence[Comparison]) -> None:
    """Write ``comparison.md``, ``comparison.json`` and a picture per comparison into a folder."""
    parts = []
    for number, comparison in enumerate(comparisons, start=1):
        picture = f"{FILE_STEM}.png"
        if len(comparisons) > 1:
            picture = f"{FILE_STEM}-{number}.png"
        plot_comparison(folder / picture, comparison)
        parts.append(_format_markdown(comparison, picture))
    (folder / f"{FILE_STEM}.md").write_text("\n".join(parts), encoding="utf-8")
    content = list(map(comparison_to_dict, comparisons))
    text = json.dumps(content, indent=2)
    (folder / f"{FILE_STEM}.json").write_text(text + "\n", encoding="utf-8")


def comparison_to_dict(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain data."""
    rows = list(map(_row_to_dict, comparison.rows))
    content = {
        "where": dict(comparison.where),
        "gate": comparison.gate,
        "equal_fields": comparison.equal_fields,
        "rows": rows,
    }
    if comparison.notes:
        content["notes"] = list(comparison.notes)
    return content


def _row_to_dict(row: RecipeRow) -> dict[str, Any]:
    gap = None
    if row.gap is not None:
        gap = dataclasses.asdict(row.gap)
    folders = [str(arm.folder) for arm in row.arms]
    return {
        "recipe": row.label,
        "gap": gap,
        "differs_in": list(row.differs_in),
        "failures": row.failures,
        **row.figures,
        "runs": folders,
    }


def _format_title(comparison: Comparison) -> str:
    title = f"Compared with {comparison.baseline.label}"
    where = []
    for name, value in comparison.where.items():
        where.append(f"{name}={value}")
    if where:
        title += f", where {', '.join(where)}"
    return title


def _format_markdown(comparison: Comparison, picture: str) -> str:
    lines = [f"## {_format_title(comparison)}", "", format_markdown(_make_rows(comparison)), ""]
    for sentence in format_sentences(comparison):
        lines.append(f"- {sentence}")
    lines += ["", f"![Losses and gaps]({picture})", ""]
    return "\n".join(lines)


def _make_rows(comparison: Comparison) -> list[dict[str, str]]:
    """Return a row for each recipe; of logs without the columns that no log has."""
    rows = list(map(_make_cells, comparison.rows))
    if not comparison.notes:
        return rows
    for heading in list(rows[0]):
        if {row[heading] for row in rows} == {"-"}:
            for row in rows:
                del row[heading]
    return rows


def _make_cells(row: RecipeRow) -> dict[str, str]:
    gap, figures = row.gap, row.figures
    verdict, share, interval = "baseline", None, "-"
    if gap is not None:
        verdict, share = gap.verdict, gap.share
        if gap.low is not None and gap.high is not None:
            interval = f"{100 * gap.low:+.2f} to {100 * gap.high:+.2f} %"
    memory = figures["peak_memory_bytes"]
    peak = "-"
    if memory is not None:
        peak = f"{memory / 2**20:,.0f}"
    ratios = []
    for operand in OPERANDS:
        if operand in figures["sqnr_db"]:
            ratios.append(f"{figures['sqnr_db'][operand]:.1f}")
    return {
        "recipe": row.label,
        "verdict": verdict,
        "gap": format_cell(share, "+.2%").replace("%", " %"),
        "90 % interval": interval,
        "loss": format_cell(row.loss),
        "validation": format_cell(figures["validation_loss"]),
        "seeds": str(len(row.arms)),
        "skipped": format_cell(figures["skipped_steps"], ""),
        "s/step": format_cell(figures["step_seconds"], ".3f"),
        "tokens/s": format_cell(figures["tokens_per_second"], ",.0f"),
        "peak MiB": peak,
        "SQNR dB (in, weight, grad)": ", ".join(ratios) or "-",
    }


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
    steps = find_common_steps(row.curves)
    if not steps:
        return
    losses = np.stack([curve.over(steps) for curve in row.curves])
    least, most = losses.min(axis=0), losses.max(axis=0)
    axes.plot(steps, losses.mean(axis=0), color=colour, linewidth=1.4, label=row.label)
    axes.fill_between(steps, least, most, color=colour, alpha=0.15, linewidth=0)


def _draw_gaps(axes: Axes, comparison: Comparison) -> None:
    """Draw each gap with its interval, the gate, and the step from which the gaps are judged."""
    gaps = {}
    windows = []
    for number, row in enumerate(comparison.rows):
        if row.gap is None:
            continue
        if row.gap.window is not None:
            windows.append(row.gap.window)
        points = row.gap.over_steps
        if points is not None:
            colour = f"C{number}"
            gaps[colour] = points
            axes.plot(points.steps, 100 * np.asarray(points.mean), color=colour, linewidth=1.4)
    gate = 100 * comparison.gate
    axes.axhspan(-gate, gate, color="tab:gray", alpha=0.15, label=f"gate: {gate:g} %")
    axes.margins(y=0.5)
    least, most = axes.get_ylim()  # of the means: an interval may be cut
    for colour, points in gaps.items():
        low, high = 100 * np.asarray(points.low), 100 * np.asarray(points.high)
        axes.fill_between(points.steps, low, high, color=colour, alpha=0.15, linewidth=0)
    if windows:
        first_step = windows[0][0]
        label = "judged from here on"
        axes.axvline(first_step, color="tab:gray", linestyle="--", linewidth=1, label=label)
    if max(-least, most) > MAX_LINEAR_GATES * gate:  # one recipe far off would flatten the others
        axes.set_yscale("symlog", linthresh=gate)
    axes.set_ylim(least, most)
    ylabel = f"gap to {comparison.baseline.label}\n(%, mean and 90 % interval)"
    axes.set(xlabel="step", ylabel=ylabel)
