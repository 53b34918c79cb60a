"""The comparison of a sweep: a table and sentences for a terminal; Markdown, JSON and a picture."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.report.answer import Answer, State
from bridge.report.comparison_picture import plot_comparison
from bridge.report.table import format_cell, format_markdown, make_table, print_renderable
from bridge.runtime.audit.quantisation import OPERANDS

if TYPE_CHECKING:
    from bridge.runtime.compare.comparison import Comparison, RecipeRow

FILE_STEM = "comparison"
VERDICT_STATES: dict[str, State] = {"within": "good", "outside": "bad", "cannot tell": "unknown"}
"""Verdict -> the state of a report's answer."""


def print_comparisons(comparisons: Sequence[Comparison]) -> None:
    """Print a table and a verdict for each recipe, for each comparison of a sweep."""
    for comparison in comparisons:
        rows = _make_rows(comparison)
        numbers = {*rows[0]} - {"recipe", "verdict"}
        print_renderable(make_table(rows, title=_format_title(comparison), numbers=numbers))
        print("\n".join(format_sentences(comparison)))  # noqa: T201  the end of a command


def format_sentences(comparison: Comparison) -> list[str]:
    """Return the notes or the proof that the runs are twins, and the verdict on each recipe."""
    lines = list(comparison.notes) or [_format_proof(comparison)]
    for row in comparison.rows[1:]:
        lines.append(row.sentence(comparison.baseline.label))
    return lines


def _format_proof(comparison: Comparison) -> str:
    """Return the sentence that proves that runs of ours are twins."""
    fields: set[str] = set()
    for row in comparison.rows:
        fields.update(row.differs_in)
    return (
        f"Twins: {comparison.equal_fields} fields of the runs are equal, and {len(fields)} fields "
        "of precision differ. Each seed has its own weights and order of the data, the same for "
        "every recipe."
    )


def collect_answers(comparisons: Sequence[Comparison]) -> dict[Path, Answer]:
    """Return folder of a run -> the result of its comparison with the baseline.

    The runs of the baseline get the notes on the whole comparison.
    """
    answer_of: dict[Path, Answer] = {}
    for comparison in comparisons:
        if len(comparison.rows) < 2:
            continue
        notes = " ".join(comparison.notes) or _format_proof(comparison)
        for row in comparison.rows:
            answer = Answer(state="unknown", sentence=notes)
            if row.gap is not None:
                sentence = row.sentence(comparison.baseline.label)
                answer = Answer(state=VERDICT_STATES[row.gap.verdict], sentence=sentence)
            for arm in row.arms:
                answer_of[arm.folder] = answer
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
    content_json = json.dumps(content, indent=2)
    (folder / f"{FILE_STEM}.json").write_text(content_json + "\n", encoding="utf-8")


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
    """Return the row of a recipe as plain data."""
    gap = None
    if row.gap is not None:
        gap = dataclasses.asdict(row.gap)
    folders = [str(arm.folder) for arm in row.arms]
    return {
        "recipe": row.label,
        "gap": gap,
        "differs_in": list(row.differs_in),
        "failures": row.failures,
        **row.metrics,
        "runs": folders,
    }


def _format_title(comparison: Comparison) -> str:
    """Return the baseline, and the settings that all runs of the comparison share."""
    title = f"Compared with {comparison.baseline.label}"
    conditions = []
    for name, value in comparison.where.items():
        conditions.append(f"{name}={value}")
    if conditions:
        title += f", where {', '.join(conditions)}"
    return title


def _format_markdown(comparison: Comparison, picture: str) -> str:
    """Return a comparison as a section of Markdown that shows a picture."""
    lines = [f"## {_format_title(comparison)}", "", format_markdown(_make_rows(comparison)), ""]
    for sentence in format_sentences(comparison):
        lines.append(f"- {sentence}")
    lines += ["", f"![Losses and gaps]({picture})", ""]
    return "\n".join(lines)


def _make_rows(comparison: Comparison) -> list[dict[str, str]]:
    """Return a row for each recipe.

    In a comparison of logs, which has notes, a column is left out if no log has its value.
    """
    rows = list(map(_make_cells, comparison.rows))
    if not comparison.notes:
        return rows
    for heading in list(rows[0]):
        if {row[heading] for row in rows} == {"-"}:
            for row in rows:
                del row[heading]
    return rows


def _make_cells(row: RecipeRow) -> dict[str, str]:
    """Return the cells of a recipe by heading."""
    gap, metrics = row.gap, row.metrics
    verdict, share, interval = "baseline", None, "-"
    if gap is not None:
        verdict, share = gap.verdict, gap.share
        if gap.low is not None and gap.high is not None:
            interval = f"{100 * gap.low:+.2f} to {100 * gap.high:+.2f} %"
    memory = metrics["peak_memory_bytes"]
    peak = "-"
    if memory is not None:
        peak = f"{memory / 2**20:,.0f}"
    ratios = []
    for operand in OPERANDS:
        if operand in metrics["sqnr_db"]:
            ratios.append(f"{metrics['sqnr_db'][operand]:.1f}")
    return {
        "recipe": row.label,
        "verdict": verdict,
        "gap": format_cell(share, "+.2%").replace("%", " %"),
        "90 % interval": interval,
        "loss": format_cell(row.loss),
        "validation": format_cell(metrics["validation_loss"]),
        "seeds": str(len(row.arms)),
        "skipped": format_cell(metrics["skipped_steps"], ""),
        "s/step": format_cell(metrics["step_seconds"], ".3f"),
        "tokens/s": format_cell(metrics["tokens_per_second"], ",.0f"),
        "peak MiB": peak,
        "SQNR dB (in, weight, grad)": ", ".join(ratios) or "-",
    }
