"""`make_log_notes`: the facts that the logs of a comparison show of their runs, or lack."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bridge.runtime.compare.arm import is_precision_field
from bridge.runtime.compare.comparison import Comparison, RecipeRow, find_varied_names
from bridge.runtime.compare.gap import LossCurve, find_common_steps
from bridge.runtime.compare.logged_run import LoggedRun, find_warm_up

MAX_NAMES = 8
"""The largest number of names that a sentence lists."""
PUBLISHED_GATE_NATS = 0.01
"""Difference of the loss that other projects accept, in nats per token.

Source: marin issue 7298 accepts FP8 with a gap of at most 0.01 to the BF16 loss at equal steps;
Megatron-LM issue 1152 expects less than 1e-2 after billions of tokens.
"""


def make_log_notes(
    runs: Sequence[LoggedRun], comparison: Comparison, rows: Sequence[RecipeRow], *, gate: float
) -> list[str]:
    """Return the notes about a comparison of logs.

    Args:
        runs: The logs.
        comparison: Their comparison.
        rows: The rows of the comparison as they are shown.
        gate: Share of the baseline's loss that a gap may reach.
    """
    return [
        _describe_twins(runs),
        *_describe_steps(comparison),
        *_describe_missing(runs),
        _describe_gate(rows, gate),
    ]


def _describe_twins(runs: Sequence[LoggedRun]) -> str:
    """Return a sentence about whether the arguments of the logs show that the runs are twins."""
    without_fields: list[str] = []
    fields: list[Mapping[str, Any]] = []
    all_names: set[str] = set()
    for run in runs:
        if not run.fields:
            without_fields.append(run.name)
        fields.append(run.fields)
        all_names.update(run.fields)
    if without_fields:
        names = _format_names(without_fields)
        return f"Whether the runs are twins is not known: no arguments of {names}."
    varied_precision: list[str] = []
    varied_others: list[str] = []
    for name in find_varied_names(fields):
        if is_precision_field(name):
            varied_precision.append(name)
        else:
            varied_others.append(name)
    equal = len(all_names) - len(varied_precision) - len(varied_others)
    if varied_others:
        return (
            f"No twins, as these arguments differ too: {_format_names(varied_others)}. A gap need "
            f"not be that of the precision. {equal} arguments are equal."
        )
    names = _format_names(varied_precision) or "none"
    return (
        f"Twins as far as the arguments show: {equal} of them are equal, and those that differ are "
        f"of the precision ({names})."
    )


def _describe_steps(comparison: Comparison) -> list[str]:
    """Return a sentence for each recipe on the steps at which it is compared with the baseline."""
    sentences = []
    baseline = comparison.baseline
    for row in comparison.rows[1:]:
        curves = [*baseline.curves, *row.curves]
        steps = find_common_steps(curves)
        if not steps:
            sentences.append(f"{row.label} has no record at a step of {baseline.label}.")
            continue
        sentences.append(
            f"{row.label} is compared with {baseline.label} at the {len(steps)} steps from "
            f"{steps[0]} to {steps[-1]} that both have."
        )
        if len(_collect_loss_kinds(curves)) > 1:
            sentences.append(
                f"One of {row.label} and {baseline.label} has the loss of single steps, and the "
                "other the mean since the record before: their losses differ for this reason too."
            )
    return sentences


def _collect_loss_kinds(curves: Sequence[LossCurve]) -> set[bool]:
    """Return the values of `is_sampled` of some curves.

    A curve with a record of each step is left out, because both values describe its losses.
    """
    kinds: set[bool] = set()
    for curve in curves:
        if len(curve.steps) < curve.steps[-1]:
            kinds.add(curve.is_sampled)
    return kinds


def _describe_missing(runs: Sequence[LoggedRun]) -> list[str]:
    """Return sentences about the metrics that the logs lack, and the notes of their reader."""
    names_of: dict[str, list[str]] = {}  # missing metrics -> names of the logs
    notes: list[str] = []
    for run in runs:
        if run.log.missing:
            names_of.setdefault(", ".join(run.log.missing), []).append(run.name)
        for note in run.log.notes:
            notes.append(f"{run.name}: {note}")
    sentences = []
    for missing, names in names_of.items():
        logs = _format_names(names)
        if len(names) == len(runs):
            logs = "any log"
        sentences.append(f"Not in {logs}: {missing}.")
    if any(find_warm_up(run.log) is None for run in runs):
        sentences.append(
            "The warm-up of the learning rate is not known, and no step is left out for it."
        )
    return [*sentences, *notes]


def _describe_gate(rows: Sequence[RecipeRow], gate: float) -> str:
    """Return a sentence about the gate, and each gap in the unit of `PUBLISHED_GATE_NATS`."""
    gaps = []
    for row in rows:
        gap = row.gap
        if gap is not None and gap.loss is not None and gap.baseline_loss is not None:
            gaps.append(f"{row.label} {gap.loss - gap.baseline_loss:+.4f}")
    sentence = f"The gate is {100 * gate:g} % of the baseline's loss."
    if gaps:
        sentence += (
            f" Others hold the difference in nats per token against {PUBLISHED_GATE_NATS:g} (marin issue "
            f"7298, Megatron-LM issue 1152); here it is {', '.join(gaps)}."
        )
    return sentence


def _format_names(names: Iterable[str]) -> str:
    """Return the first `MAX_NAMES` names with commas, and a count of the others."""
    all_names = list(names)
    shown = ", ".join(all_names[:MAX_NAMES])
    if len(all_names) > MAX_NAMES:
        shown += f" and {len(all_names) - MAX_NAMES} more"
    return shown
