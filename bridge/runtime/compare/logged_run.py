"""A run that a log shows: its losses, its warm-up, and its arm in a comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.runtime.audit.run_log import RunLog
from bridge.runtime.compare.arm import Arm, is_precision_field
from bridge.runtime.compare.gap import LossCurve

LABEL_KEY = "label"
"""Key of an arm's precision for the precision in a few words."""
LOG_KEY = "log"
"""Key of an arm's precision for the name of a log that shares its row with no other log."""
IDENTITY_KEYS = (LABEL_KEY, LOG_KEY)
"""Keys of an arm's precision that are no fields."""


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


def make_log_arms(runs: Sequence[LoggedRun]) -> list[Arm]:
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
        of_precision = {name: run.fields[name] for name in run.fields if is_precision_field(name)}
        precision: dict[str, Any] = {LABEL_KEY: run.precision, **of_precision}
        label = run.precision or run.name
        if not are_grouped or (run.precision, seed) in seen:
            precision[LOG_KEY] = run.name
            if run.precision and precisions.count(run.precision) > 1:
                label = f"{run.precision} ({run.name})"
        seen.add((run.precision, seed))
        paired_by: tuple[Any, ...] = (0,)
        if knows_seeds:
            paired_by = (seed,)
        folder = get_log_path(run, runs)
        arms.append(_make_arm(run.log, folder, label=label, precision=precision, seed=paired_by))
    return arms


def get_log_path(run: LoggedRun, runs: Sequence[LoggedRun]) -> Path:
    """Return the path of a run's log; that of one of several runs in a file ends with its name."""
    path = run.log.path
    for other in runs:
        if other is not run and other.log.path == path:
            return path / run.name
    return path


def _make_arm(
    log: RunLog, folder: Path, *, label: str, precision: Mapping[str, Any], seed: tuple[Any, ...]
) -> Arm:
    """Return the arm of a log; its figures stand where those of a run's summary do."""
    validation_loss = None
    if log.validation:
        _step, validation_loss = log.validation[-1]
    summary = {
        "iteration": log.last_step,
        "skipped_steps": log.skipped_steps,
        "step_seconds": log.compute_mean_throughput("seconds_per_step"),
        "tokens_per_second": log.compute_mean_throughput("tokens_per_second"),
        "validation_loss": validation_loss,
    }
    return Arm(
        folder=folder,
        label=label,
        precision=precision,
        rest={},
        seed=seed,
        warm_up=find_warm_up(log) or 0,
        curve=make_curve(log),
        summary=summary,
    )


def make_curve(log: RunLog) -> LossCurve:
    """Return the training loss of a log; steps that were all skipped have no record."""
    steps: list[int] = []
    losses: list[float] = []
    for record in log.train:
        if record.loss is not None:
            steps.append(record.step)
            losses.append(record.loss)
    return LossCurve(steps=tuple(steps), losses=tuple(losses), is_sampled=log.is_sampled)


def find_warm_up(log: RunLog) -> int | None:
    """Return the steps in which the learning rate rises; None where nothing shows them.

    The learning rates of the log decide. Where it has none, the arguments do, as in Megatron-LM
    d98e8a64 megatron/training/training.py get_optimizer_param_scheduler.
    """
    rates = log.values("learning_rate")
    if rates:
        return _find_highest_rate_step(log, rates[0])
    arguments = log.arguments
    fraction = arguments.get("lr_warmup_fraction")
    decay_iters = arguments.get("lr_decay_iters") or arguments.get("train_iters")
    if isinstance(fraction, float) and isinstance(decay_iters, int):
        return int(fraction * decay_iters)
    iters = arguments.get("lr_warmup_iters")
    if isinstance(iters, int):
        return iters
    return None


def _find_highest_rate_step(log: RunLog, first_rate: float) -> int:
    """Return the first step with the highest learning rate, 0 where the first rate is the highest."""
    step, highest = 0, first_rate
    for record in log.train:
        rate = record.learning_rate
        if rate is not None and rate > highest:
            step, highest = record.step, rate
    return step
