"""Training against rollout for people: every kind of module and tensor, the differences, and what would agree."""

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
from bridge.report.table import table

VERDICTS = {
    EQUAL: "Training and rollout are equal.",
    DIFFERS: "Training and rollout differ.",
    UNKNOWN: "Training and rollout are equal as far as it is known; the rest cannot be known from this file.",
}


def rollout_table(
    found: RolloutComparison, name: str, agreements: Sequence[Agreement]
) -> RenderableType:
    """Return the comparison as something rich can print."""
    rows = []
    for row in found.rows:
        columns = {"": row.verdict, "module or tensor": row.subject, "layers": _places(row)}
        rows.append({**columns, "training": row.training, "rollout": row.rollout})
    engine = found.rollout.engine or "an engine that is not named"
    title = f"training: {name}\nrollout: {engine}"
    shown = table(rows, title=title, wraps=("training", "rollout", "layers"))
    lines = [_verdict_of(found)]
    for row in found.rows:
        if row.verdict == DIFFERS:
            lines.append(f"  {row.sentence()}")
    lines.extend(f"  {sentence}" for sentence in _unknown(found.rows))
    if found.rollout.sent:
        lines.append(f"  {found.rollout.sent}")
    lines.extend(f"  {note}" for note in found.notes)
    for agreement in agreements:
        lines.extend(_agreement_lines(agreement))
    return Group(shown, *(Text(line) for line in lines))


def _verdict_of(found: RolloutComparison) -> str:
    layers_agree = any(row.layers and row.verdict == EQUAL for row in found.rows)
    if found.verdict == UNKNOWN and not layers_agree:
        return "It cannot be known from this file whether training and rollout agree."
    return VERDICTS[found.verdict]


def _places(row: RolloutRow) -> str:
    if row.modules is None:
        return row.layers
    counted = f"{row.modules} module{'s' if row.modules != 1 else ''}"
    return f"{row.layers} ({counted})" if row.layers else counted


def _unknown(rows: Sequence[RolloutRow]) -> list[str]:
    """Return a sentence for everything that one source decides."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.verdict == UNKNOWN:
            found.setdefault(row.decided_by, []).append(row.subject)
    sentences = []
    for decider, subjects in found.items():
        names = ", ".join(dict.fromkeys(subjects))
        sentences.append(f"Cannot be known: {names}. Decided by {decider.rstrip(',')}.")
    return sentences


def _agreement_lines(agreement: Agreement) -> list[str]:
    if agreement.why_not:
        return [f"No {agreement.side} that agrees: {agreement.why_not}"]
    if agreement.quantization_config is not None:
        block = {"quantization_config": dict(agreement.quantization_config)}
        if not agreement.quantization_config:
            return ["A rollout that agrees: a checkpoint without a quantization_config."]
        return ["A rollout that agrees has this in the config.json:", f"  {json.dumps(block)}"]
    heading = f"A {agreement.side} that agrees:"
    lines = [heading, *(f"  {word}" for word in agreement.words)]
    if agreement.remains:
        lines.append(f"  {agreement.remains}")
    return lines
