"""`compare_logs`: runs that logs show, judged as runs of our own are, and what stays unknown of them.

A run of our own proves that it is the twin of another: its folder has every field. A log has its
losses, and perhaps arguments. So a comparison of logs says first which arguments are equal, at
which steps the losses were compared, and what no log has.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bridge.runtime.audit.run_log import RunLog
from bridge.runtime.compare.arm import Arm, is_of_precision
from bridge.runtime.compare.comparison import Comparison, RecipeRow, compare, varied_names
from bridge.runtime.compare.gap import GATE, Curve, common_steps

INTERVAL_SETTING = "--log-interval"
"""Megatron-LM's setting that decides how often a loss is printed."""
LABEL, LOG = "label", "log"
"""Keys of an arm's precision that are no fields: its label, and the name of a log that shares its
row with no other."""
MOST_NAMES = 8
"""Arguments that a sentence names."""
POLICY = (
    "The loss of a policy gradient need not fall, and its gap is no measure of the policy. "
    "Compare the rewards."
)
"""Why a loss is not judged."""
FIELD_GATE = 0.01
"""In nats per token; see `gate_sentence`."""


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """A run of a log, with what is known of its settings."""

    log: RunLog
    name: str
    """Different for each log of a comparison."""
    precision: str = ""
    """The precision in a few words; empty where no argument states it."""
    fields: Mapping[str, Any]
    """Fields of Megatron's configs by dotted name, and other arguments; empty where unknown."""


def compare_logs(runs: Sequence[LoggedRun], *, gate: float = GATE) -> Comparison:
    """Return the comparison of logs; the first one is of the baseline.

    Logs of equal precision and of different seeds are of one recipe. Where a seed is unknown, each
    log is a recipe by itself.
    """
    arms = _arms(runs)
    comparison = compare(arms, gate=gate, interval_setting=INTERVAL_SETTING)[0]
    rows = []
    for row in comparison.rows:
        rows.append(_row_of_logs(row, runs))
    notes = [
        _twins_sentence(runs),
        *_steps_sentences(comparison),
        *_left_out(runs),
        gate_sentence(rows, gate),
    ]
    return replace(comparison, rows=tuple(rows), notes=tuple(notes))


def _row_of_logs(row: RecipeRow, runs: Sequence[LoggedRun]) -> RecipeRow:
    """Return a row without the keys that are no fields; the loss of a policy is not judged."""
    differs_in = []
    for name in row.differs_in:
        if name not in (LABEL, LOG):
            differs_in.append(name)
    gap = row.gap
    is_policy = any(run.log.is_policy for run in runs)
    # A loss that is not finite has no window, and is outside for a policy too.
    if is_policy and gap is not None and gap.window is not None:
        gap = replace(gap, verdict="cannot tell", reason=POLICY)
    return replace(row, differs_in=tuple(differs_in), gap=gap)


def _arms(runs: Sequence[LoggedRun]) -> list[Arm]:
    """Return an arm for each log; logs of one recipe have the same precision, and a seed each.

    Where a seed is unknown, every log has the same, so that each is a pair with the first.
    """
    seeds: list[int | None] = []
    precisions: list[str] = []
    for run in runs:
        seeds.append(run.log.seed())
        precisions.append(run.precision)
    knows_seeds = None not in seeds
    are_grouped = knows_seeds and len({*precisions}) > 1 and "" not in precisions
    seen: set[tuple[str, object]] = set()
    arms = []
    for run, seed in zip(runs, seeds, strict=True):
        of_precision = {name: run.fields[name] for name in run.fields if is_of_precision(name)}
        precision: dict[str, Any] = {LABEL: run.precision, **of_precision}
        label = run.precision or run.name
        if not are_grouped or (run.precision, seed) in seen:
            precision[LOG] = run.name
            if run.precision and precisions.count(run.precision) > 1:
                label = f"{run.precision} ({run.name})"
        seen.add((run.precision, seed))
        paired_by: tuple[Any, ...] = (0,)
        if knows_seeds:
            paired_by = (seed,)
        folder = place_of(run, runs)
        arms.append(_arm(run.log, folder, label=label, precision=precision, seed=paired_by))
    return arms


def place_of(run: LoggedRun, runs: Sequence[LoggedRun]) -> Path:
    """Return the path of a run's log; that of one of several runs in a file ends with its name."""
    path = run.log.path
    for other in runs:
        if other is not run and other.log.path == path:
            return path / run.name
    return path


def _arm(
    log: RunLog, folder: Path, *, label: str, precision: Mapping[str, Any], seed: tuple[Any, ...]
) -> Arm:
    """Return the arm of a log; its figures stand where those of a run's summary do."""
    validation_loss = None
    if log.validation:
        _step, validation_loss = log.validation[-1]
    summary = {
        "iteration": log.last_step,
        "skipped_steps": log.skipped_steps,
        "step_seconds": log.speed("seconds_per_step"),
        "tokens_per_second": log.speed("tokens_per_second"),
        "validation_loss": validation_loss,
    }
    return Arm(
        folder=folder,
        label=label,
        precision=precision,
        rest={},
        seed=seed,
        warm_up=warm_up_of(log) or 0,
        curve=curve_of(log),
        summary=summary,
    )


def curve_of(log: RunLog) -> Curve:
    """Return the training loss of a log; steps that were all skipped have no record."""
    steps: list[int] = []
    losses: list[float] = []
    for record in log.train:
        if record.loss is not None:
            steps.append(record.step)
            losses.append(record.loss)
    return Curve(steps=tuple(steps), losses=tuple(losses), is_sampled=log.is_sampled)


def warm_up_of(log: RunLog) -> int | None:
    """Return the steps in which the learning rate rises; None where nothing shows them.

    The learning rates of the log decide. Where it has none, the arguments do, as in Megatron-LM
    d98e8a64 megatron/training/training.py get_optimizer_param_scheduler.
    """
    rates = log.values("learning_rate")
    if rates:
        highest = max(rates)
        for record in log.train:
            if record.learning_rate == highest:
                break
        if rates[0] == highest:
            return 0
        return record.step
    arguments = log.arguments
    fraction = arguments.get("lr_warmup_fraction")
    decay_iters = arguments.get("lr_decay_iters") or arguments.get("train_iters")
    if isinstance(fraction, float) and isinstance(decay_iters, int):
        return int(fraction * decay_iters)
    iters = arguments.get("lr_warmup_iters")
    if isinstance(iters, int):
        return iters
    return None


def _twins_sentence(runs: Sequence[LoggedRun]) -> str:
    """Return how far the arguments of the logs show that the runs are twins."""
    unknown: list[str] = []
    fields: list[Mapping[str, Any]] = []
    every: set[str] = set()
    for run in runs:
        if not run.fields:
            unknown.append(run.name)
        fields.append(run.fields)
        every.update(run.fields)
    if unknown:
        names = listed_names(unknown)
        return f"Whether the runs are twins is not known: no arguments of {names}."
    of_precision: list[str] = []
    others: list[str] = []
    for name in varied_names(fields):
        if is_of_precision(name):
            of_precision.append(name)
        else:
            others.append(name)
    equal = len(every) - len(of_precision) - len(others)
    if others:
        return (
            f"No twins, as these arguments differ too: {listed_names(others)}. A gap need not be "
            f"that of the precision. {equal} arguments are equal."
        )
    names = listed_names(of_precision) or "none"
    return (
        f"Twins as far as the arguments show: {equal} of them are equal, and those that differ are "
        f"of the precision ({names})."
    )


def _steps_sentences(comparison: Comparison) -> list[str]:
    """Return for each recipe at which steps its losses are compared with the baseline's."""
    sentences = []
    baseline = comparison.baseline
    for row in comparison.rows[1:]:
        curves = [*baseline.curves, *row.curves]
        steps = common_steps(curves)
        if not steps:
            sentences.append(f"{row.label} has no record at a step of {baseline.label}.")
            continue
        sentences.append(
            f"{row.label} is compared with {baseline.label} at the {len(steps)} steps from "
            f"{steps[0]} to {steps[-1]} that both have."
        )
        if len(_kinds_of_loss(curves)) > 1:
            sentences.append(
                f"One of {row.label} and {baseline.label} has the loss of single steps, and the "
                "other the mean since the record before: their losses differ for this reason too."
            )
    return sentences


def _kinds_of_loss(curves: Sequence[Curve]) -> set[bool]:
    """Return whether losses are of single steps; a curve with a record of each step is both."""
    kinds: set[bool] = set()
    for curve in curves:
        if len(curve.steps) < curve.steps[-1]:
            kinds.add(curve.is_sampled)
    return kinds


def _left_out(runs: Sequence[LoggedRun]) -> list[str]:
    """Return what the logs lack, a sentence for each set of figures, and what was left out of them."""
    names_of: dict[str, list[str]] = {}  # the figures that are missing -> the logs
    notes: list[str] = []
    for run in runs:
        if run.log.missing:
            names_of.setdefault(", ".join(run.log.missing), []).append(run.name)
        for note in run.log.notes:
            notes.append(f"{run.name}: {note}")
    lines = []
    for missing, names in names_of.items():
        where = listed_names(names)
        if len(names) == len(runs):
            where = "any log"
        lines.append(f"Not in {where}: {missing}.")
    if any(warm_up_of(run.log) is None for run in runs):
        lines.append(
            "The warm-up of the learning rate is not known, and no step is left out for it."
        )
    return [*lines, *notes]


def gate_sentence(rows: Sequence[RecipeRow], gate: float) -> str:
    """Return the gate, and each gap in the unit of the gate that others use.

    Source: marin issue 7298 accepts FP8 with a gap of at most 0.01 to the BF16 loss at equal steps;
    Megatron-LM issue 1152 expects less than 1e-2 after billions of tokens.
    """
    gaps = []
    for row in rows:
        gap = row.gap
        if gap is not None and gap.loss is not None and gap.baseline_loss is not None:
            gaps.append(f"{row.label} {gap.loss - gap.baseline_loss:+.4f}")
    sentence = f"The gate is {100 * gate:g} % of the baseline's loss."
    if gaps:
        sentence += (
            f" Others hold the difference in nats per token against {FIELD_GATE:g} (marin issue "
            f"7298, Megatron-LM issue 1152); here it is {', '.join(gaps)}."
        )
    return sentence


def listed_names(names: Iterable[str]) -> str:
    """Return names with commas, the first `MOST_NAMES` of them."""
    all_names = list(names)
    shown = ", ".join(all_names[:MOST_NAMES])
    if len(all_names) > MOST_NAMES:
        shown += f" and {len(all_names) - MOST_NAMES} more"
    return shown
