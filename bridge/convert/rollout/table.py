"""`make_rollout_table`: a comparison of training and rollout as a table and sentences."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.convert.rollout.agreement import Agreement
from bridge.convert.rollout.comparison import (
    DIFFERS,
    EQUAL,
    UNKNOWN,
    RolloutComparison,
    RolloutRow,
)
from bridge.report.table import make_table

VERDICT_SENTENCES = {
    EQUAL: "Training and rollout are equal.",
    DIFFERS: "Training and rollout differ.",
    UNKNOWN: "Training and rollout are equal as far as it is known; the rest cannot be known from this file.",
}


def make_rollout_table(
    comparison: RolloutComparison, name: str, agreements: Sequence[Agreement]
) -> RenderableType:
    """Return the comparison, with the settings that would agree, as a renderable of rich.

    Args:
        name: The name of the run.
        agreements: The settings with which either side would agree.
    """
    rows: list[dict[str, str]] = []
    for row in comparison.rows:
        rows.append(
            {
                "": row.verdict,
                "module or tensor": row.subject,
                "layers": _format_modules(row),
                "training": row.training,
                "rollout": row.rollout,
            }
        )
    engine = comparison.rollout.engine or "an engine that is not named"
    title = f"training: {name}\nrollout: {engine}"
    shown = make_table(rows, title=title, wraps=("training", "rollout", "layers"))
    lines = [_describe_verdict(comparison)]
    for row in comparison.rows:
        if row.verdict == DIFFERS:
            lines.append(f"  {row.describe_difference()}")
    lines.extend(f"  {sentence}" for sentence in _describe_unknown_rows(comparison.rows))
    if comparison.rollout.sent:
        lines.append(f"  {comparison.rollout.sent}")
    lines.extend(f"  {note}" for note in comparison.notes)
    for agreement in agreements:
        lines.extend(_format_agreement(agreement))
    return Group(shown, *(Text(line) for line in lines))


def _describe_verdict(comparison: RolloutComparison) -> str:
    """Return the verdict as a sentence."""
    layers_agree = any(row.layers and row.verdict == EQUAL for row in comparison.rows)
    if comparison.verdict == UNKNOWN and not layers_agree:
        return "It cannot be known from this file whether training and rollout agree."
    return VERDICT_SENTENCES[comparison.verdict]


def _format_modules(row: RolloutRow) -> str:
    """Return the layers of a row and the number of its modules, as text."""
    if row.modules is None:
        return row.layers
    count = f"{row.modules} modules"
    if row.modules == 1:
        count = "1 module"
    if not row.layers:
        return count
    return f"{row.layers} ({count})"


def _describe_unknown_rows(rows: Sequence[RolloutRow]) -> list[str]:
    """Return a sentence for each source that decides rows which cannot be known."""
    subjects_by_decider: dict[str, list[str]] = {}
    for row in rows:
        if row.verdict == UNKNOWN:
            subjects_by_decider.setdefault(row.decided_by, []).append(row.subject)
    sentences: list[str] = []
    for decider, subjects in subjects_by_decider.items():
        names = ", ".join(dict.fromkeys(subjects))
        sentences.append(f"Cannot be known: {names}. Decided by {decider.rstrip(',')}.")
    return sentences


def _format_agreement(agreement: Agreement) -> list[str]:
    """Return the lines about an agreement: a heading and a line per setting, or the reason."""
    config = agreement.quantization_config
    if agreement.why_not:
        return [f"No {agreement.side} that agrees: {agreement.why_not}"]
    if config is not None and not config:
        return ["A rollout that agrees: a checkpoint without a quantization_config."]
    if config is not None:
        block = {"quantization_config": dict(config)}
        return ["A rollout that agrees has this in the config.json:", f"  {json.dumps(block)}"]
    heading = f"A {agreement.side} that agrees:"
    lines = [heading, *(f"  {word}" for word in agreement.words)]
    if agreement.remains:
        lines.append(f"  {agreement.remains}")
    return lines
