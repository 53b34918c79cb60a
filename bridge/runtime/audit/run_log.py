"""`RunLog`: the metrics of a run that another trainer logged, in any format of log.

`read.logs` makes it. Its records have the names of ``metrics.jsonl``, so that early warnings,
reports and comparisons read a log as they read a run of this project.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

METRIC_NOUNS = {
    "grad_norm": "gradient norm",
    "loss_scale": "loss scale",
    "skipped": "skipped steps",
    "learning_rate": "learning rate",
}
"""Metric of a record that a log may lack -> its name in a sentence."""
THROUGHPUT_METRICS = ("seconds_per_step", "tokens_per_second", "tflops_per_gpu")
"""Metrics of the throughput. A log with any of them has the throughput."""
MAX_SHOWN_STEPS = 3
"""The largest number of steps that a sentence about non-finite losses lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogRecord:
    """The metrics that a log has for one step, or for the steps since the record before.

    A metric is None if the log does not have it in this record.
    """

    step: int
    """The last step of the record."""
    loss: float | None = None
    """In nats per token. It may be NaN or infinity. None: every step was skipped."""
    grad_norm: float | None = None
    """Norm of the gradients before clipping."""
    loss_scale: float | None = None
    learning_rate: float | None = None
    skipped: int | None = None
    """Steps since the record before that updated nothing."""
    seconds_per_step: float | None = None
    tokens_per_second: float | None = None
    tflops_per_gpu: float | None = None
    """Model TFLOP per second of one GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLog:
    """One run, as its log shows it."""

    path: Path
    name: str
    """The run's name in the log, or the name of the file or folder."""
    source: str
    """The kind of log, with its article: "a log of Megatron-LM", for example."""
    train: tuple[LogRecord, ...]
    """Records in the order of the steps; at least one has a loss."""
    validation: tuple[tuple[int, float], ...] = ()
    """(step, loss) of each validation."""
    is_sampled: bool
    """Whether a loss is the loss of a single step. False: it is the mean since the last record."""
    train_iters: int | None = None
    """Steps that the run was to make. None: the log does not state them."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Megatron-LM's arguments by name; empty if the log has none."""
    described_by: Path | None = None
    """The file with these arguments. None: no arguments."""
    is_policy: bool = False
    """Whether the loss is the loss of a policy gradient, which need not fall."""
    notes: tuple[str, ...] = ()
    """Sentences about the parts of the log that were left out."""

    @property
    def missing(self) -> list[str]:
        """The names of the metrics that the log lacks, for a sentence."""
        names = []
        for metric, noun in METRIC_NOUNS.items():
            if not self.list_values(metric):
                names.append(noun)
        if not any(self.list_values(metric) for metric in THROUGHPUT_METRICS):
            names.append("throughput")
        if not self.arguments:
            names.append("arguments (precision and seed)")
        return names

    @property
    def missing_sentence(self) -> str:
        """A sentence about the metrics that the log lacks; empty if it has all of them."""
        if not self.missing:
            return ""
        return f"Not in this log: {', '.join(self.missing)}."

    @property
    def last_step(self) -> int:
        """The last step of which the log has a record."""
        return self.train[-1].step

    @property
    def skipped_steps(self) -> int | None:
        """Number of all skipped steps. None: the log does not count them."""
        counts = self.list_values("skipped")
        if not counts:
            return None
        return int(sum(counts))

    @property
    def has_ended(self) -> bool:
        """Whether the log shows the last step that the run was to make."""
        return self.train_iters is not None and self.last_step >= self.train_iters

    def list_values(self, metric: str) -> list[float]:
        """Return the values of a metric, a field of `LogRecord`, without the records that lack it."""
        values = []
        for record in self.train:
            value = getattr(record, metric)
            if value is not None:
                values.append(value)
        return values

    def compute_mean_throughput(self, metric: str) -> float | None:
        """Return the mean of a metric of `THROUGHPUT_METRICS`, or None if the log lacks it.

        The first record does not count, unless it is the only record. Its step compiles and
        allocates.
        """
        values = self.list_values(metric)
        if not values:
            return None
        return fmean(values[1:] or values)

    def get_seed(self) -> int | None:
        """Return the seed of the run, or None if no argument states it."""
        seed = self.arguments.get("seed")
        if isinstance(seed, int):
            return seed
        return None

    def list_records(self) -> list[dict[str, Any]]:
        """Return the records that have a loss, in the form of ``metrics.jsonl``.

        A loss or a gradient norm that is not finite is None. `skipped_steps` counts up from the
        first record, and stays 0 if the log does not count skipped steps. The loss scale is None in
        all records if one record lacks it: a gap would look like a change of the scale.
        """
        with_loss = [record for record in self.train if record.loss is not None]
        has_scale = all(record.loss_scale is not None for record in with_loss)
        rows = []
        skipped_steps = 0
        for record in self.train:
            skipped_steps += record.skipped or 0
            if record.loss is None:
                continue
            loss_scale = None
            if has_scale:
                loss_scale = record.loss_scale
            rows.append(
                {
                    "kind": "train",
                    "step": record.step,
                    "loss": _drop_non_finite(record.loss),
                    "skipped": bool(record.skipped),
                    "skipped_steps": skipped_steps,
                    "grad_norm": _drop_non_finite(record.grad_norm),
                    "loss_scale": loss_scale,
                    "learning_rate": record.learning_rate,
                    "tokens_per_second": record.tokens_per_second,
                    "not_finite": _describe_not_finite(record),
                }
            )
        return rows

    def list_validations(self) -> list[dict[str, Any]]:
        """Return the validations in the form of ``metrics.jsonl``."""
        rows: list[dict[str, Any]] = []
        for step, loss in self.validation:
            rows.append({"kind": "validation", "step": step, "loss": _drop_non_finite(loss)})
        return rows


def describe_lost_steps(finite_at: Mapping[int, bool]) -> str | None:
    """Return the steps at which a loss was not finite, as an adverbial of time.

    Args:
        finite_at: Step of each record -> whether its loss is finite, in the order of the steps.

    Returns:
        "at step 21", "at steps 21 and 25", "from step 21 on" if no later loss was finite, or "at
        step 21 and from step 30 on". None if every loss is finite.
    """
    lost_between: list[int] = []
    lost_at_end: list[int] = []
    for step, is_finite in finite_at.items():
        if is_finite:
            lost_between.extend(lost_at_end)
            lost_at_end.clear()
        else:
            lost_at_end.append(step)
    parts = []
    if lost_between:
        parts.append(f"at {_format_steps(lost_between)}")
    if lost_at_end:
        parts.append(f"from step {lost_at_end[0]} on")
    return " and ".join(parts) or None


def _format_steps(steps: Sequence[int]) -> str:
    """Return "step 3", "steps 3 and 5", or the first `MAX_SHOWN_STEPS` and a count of the others."""
    shown = [str(step) for step in steps[:MAX_SHOWN_STEPS]]
    if len(steps) > MAX_SHOWN_STEPS:
        shown.append(f"{len(steps) - MAX_SHOWN_STEPS} more")
    if len(shown) == 1:
        return f"step {shown[0]}"
    return f"steps {', '.join(shown[:-1])} and {shown[-1]}"


def _drop_non_finite(value: float | None) -> float | None:
    """Return a finite value unchanged, or None for NaN, infinity and None."""
    if value is None or not math.isfinite(value):
        return None
    return value


def _describe_not_finite(record: LogRecord) -> str | None:
    """Return the location of a non-finite gradient. A log has only its step."""
    if record.grad_norm is None or math.isfinite(record.grad_norm):
        return None
    return f"at step {record.step}"


def make_unique_names(logs: Sequence[RunLog]) -> list[str]:
    """Return a different name for each log, in the order of the logs.

    Logs with the same name get the name of the nearest folder that is different for all of them. If
    there is no such folder, they get their whole path.
    """
    logs_of: dict[str, list[RunLog]] = {}
    for log in logs:
        logs_of.setdefault(log.name, []).append(log)
    names = []
    for log in logs:
        names.append(_make_unique_name(log, logs_of[log.name]))
    return names


def _make_unique_name(log: RunLog, namesakes: Sequence[RunLog]) -> str:
    """Return the name of a log among all logs that have the same name, itself included."""
    if len(namesakes) == 1:
        return log.name
    depth = min(len(other.path.parts) for other in namesakes)
    for position in range(2, depth + 1):  # counted from the end of the path
        folders = {other.path.parts[-position] for other in namesakes}
        if len(folders) == len(namesakes):
            return log.path.parts[-position]
    return str(log.path)
