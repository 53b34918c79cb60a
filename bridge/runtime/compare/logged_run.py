"""`LoggedRun`: a run that is known only by its log, and its arm in a comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.runtime.audit.run_log import RunLog
from bridge.runtime.compare.arm import Arm, is_precision_field
from bridge.runtime.compare.gap import LossCurve

LABEL_KEY = "label"
"""Key of an arm's precision for the short text of the precision."""
LOG_KEY = "log"
"""Key of an arm's precision for the name of the log, if the log has a separate row."""
IDENTITY_KEYS = (LABEL_KEY, LOG_KEY)
"""Keys of an arm's precision that are not fields. They only decide which logs share a row."""


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """The log of a run, with the settings that are known."""

    log: RunLog
    name: str
    """Name of the log. Each log of a comparison has a different name."""
    precision: str = ""
    """Short text of the precision; empty if no argument states it."""
    fields: Mapping[str, Any]
    """Dotted name -> value of fields of Megatron's configs, and other arguments; empty if unknown."""


def make_log_arms(runs: Sequence[LoggedRun]) -> list[Arm]:
    """Return an arm for each log, in the order of the logs.

    Logs of the same precision and different seeds share a row. Each log has a separate row if a
    seed or a precision is unknown, or if all logs have the same precision. If a seed is unknown,
    all arms get the same seed, so that each log is paired with the first.
    """
    seeds: list[int | None] = []
    precisions: list[str] = []
    for run in runs:
        seeds.append(run.log.get_seed())
        precisions.append(run.precision)
    knows_seeds = None not in seeds
    are_grouped = knows_seeds and len({*precisions}) > 1 and "" not in precisions
    seen: set[tuple[str, object]] = set()
    arms = []
    for run, seed in zip(runs, seeds, strict=True):
        precision_fields = {
            name: value for name, value in run.fields.items() if is_precision_field(name)
        }
        precision: dict[str, Any] = {LABEL_KEY: run.precision, **precision_fields}
        label = run.precision or run.name
        if not are_grouped or (run.precision, seed) in seen:
            precision[LOG_KEY] = run.name
            if run.precision and precisions.count(run.precision) > 1:
                label = f"{run.precision} ({run.name})"
        seen.add((run.precision, seed))
        arm_seed: tuple[Any, ...] = (0,)
        if knows_seeds:
            arm_seed = (seed,)
        path = get_log_path(run, runs)
        arms.append(_make_arm(run.log, path, label=label, precision=precision, seed=arm_seed))
    return arms


def get_log_path(run: LoggedRun, runs: Sequence[LoggedRun]) -> Path:
    """Return the path of a run's log, followed by the run's name if several runs share the file."""
    path = run.log.path
    for other in runs:
        if other is not run and other.log.path == path:
            return path / run.name
    return path


def _make_arm(
    log: RunLog, path: Path, *, label: str, precision: Mapping[str, Any], seed: tuple[Any, ...]
) -> Arm:
    """Return the arm of a log, whose metrics replace a run's ``summary.json``."""
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
        folder=path,
        label=label,
        precision=precision,
        rest={},
        seed=seed,
        warm_up=find_warm_up(log) or 0,
        curve=make_curve(log),
        summary=summary,
    )


def make_curve(log: RunLog) -> LossCurve:
    """Return the training loss of a log. Steps that were all skipped have no record."""
    steps: list[int] = []
    losses: list[float] = []
    for record in log.train:
        if record.loss is not None:
            steps.append(record.step)
            losses.append(record.loss)
    return LossCurve(steps=tuple(steps), losses=tuple(losses), is_sampled=log.is_sampled)


def find_warm_up(log: RunLog) -> int | None:
    """Return the steps in which the learning rate rises.

    The result is None if neither log nor arguments show it.

    The learning rates of the log decide. Without them the arguments do, as in Megatron-LM d98e8a64
    megatron/training/training.py get_optimizer_param_scheduler.
    """
    rates = log.list_values("learning_rate")
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
    """Return the first step with the highest learning rate, 0 if the first rate is the highest."""
    step, highest = 0, first_rate
    for record in log.train:
        rate = record.learning_rate
        if rate is not None and rate > highest:
            step, highest = record.step, rate
    return step
