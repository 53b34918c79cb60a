"""`RunLog`: the metrics of a run that another trainer logged, whatever the log's format.

`read.logs` makes it. Its records have the names of ``metrics.jsonl``, so that the early warnings,
the report and the comparison ask a log as they ask a run of our own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

FIGURE_NOUNS = {
    "grad_norm": "gradient norm",
    "loss_scale": "loss scale",
    "skipped": "skipped steps",
    "learning_rate": "learning rate",
}
"""Figure of a record that a log may lack -> its name in a sentence."""
THROUGHPUT_FIGURES = ("seconds_per_step", "tokens_per_second", "tflops_per_gpu")
"""Figures of the throughput; a log has it with any of them."""
MAX_SHOWN_STEPS = 3
"""Steps that a sentence on losses that are not finite lists at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogRecord:
    """The figures that a log has for one step, or for the steps since the record before.

    None stands for a figure that the log does not have there.
    """

    step: int
    loss: float | None = None
    """NaN or infinity where the loss was not finite; None where every step was skipped."""
    grad_norm: float | None = None
    loss_scale: float | None = None
    learning_rate: float | None = None
    skipped: int | None = None
    """Steps since the record before that updated nothing."""
    seconds_per_step: float | None = None
    tokens_per_second: float | None = None
    tflops_per_gpu: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLog:
    """One run, as its log shows it."""

    path: Path
    name: str
    """The run's name in the log, or that of the file or folder."""
    source: str
    """The kind of log, with its article: "a log of Megatron-LM", for example."""
    train: tuple[LogRecord, ...]
    """In the order of the steps; at least one has a loss."""
    validation: tuple[tuple[int, float], ...] = ()
    """(step, loss) of each validation."""
    is_sampled: bool
    """Whether a loss is that of its step alone, and not the mean since the record before."""
    train_iters: int | None = None
    """Steps that the run was to make; None where the log has no such number."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Megatron-LM's arguments by name; empty where the log has none."""
    described_by: Path | None = None
    """The file with these arguments; None without arguments."""
    is_policy: bool = False
    """Whether the loss is that of a policy gradient, which need not fall."""
    notes: tuple[str, ...] = ()
    """What was left out of the log, as sentences."""

    @property
    def missing(self) -> list[str]:
        """The figures that the log lacks, as nouns."""
        names = []
        for figure, noun in FIGURE_NOUNS.items():
            if not self.values(figure):
                names.append(noun)
        if not any(self.values(figure) for figure in THROUGHPUT_FIGURES):
            names.append("throughput")
        if not self.arguments:
            names.append("arguments (precision and seed)")
        return names

    @property
    def missing_sentence(self) -> str:
        """The figures that the log lacks as a sentence; empty where it has them all."""
        if not self.missing:
            return ""
        return f"Not in this log: {', '.join(self.missing)}."

    @property
    def last_step(self) -> int:
        """The last step of which the log has a record."""
        return self.train[-1].step

    @property
    def skipped_steps(self) -> int | None:
        """Steps that were skipped in all; None where the log does not count them."""
        counts = self.values("skipped")
        if not counts:
            return None
        return int(sum(counts))

    @property
    def has_ended(self) -> bool:
        """Whether the log shows the last step that the run was to make."""
        return self.train_iters is not None and self.last_step >= self.train_iters

    def values(self, figure: str) -> list[float]:
        """Return a figure of each record that has it."""
        values = []
        for record in self.train:
            value = getattr(record, figure)
            if value is not None:
                values.append(value)
        return values

    def compute_mean_throughput(self, figure: str) -> float | None:
        """Return the mean of a figure of the throughput after the first record.

        The first step compiles and allocates. None where the log does not have the figure.
        """
        values = self.values(figure)
        if not values:
            return None
        return fmean(values[1:] or values)

    def seed(self) -> int | None:
        """Return the seed of the run; None where no argument states it."""
        seed = self.arguments.get("seed")
        if isinstance(seed, int):
            return seed
        return None

    def records(self) -> list[dict[str, Any]]:
        """Return the records that have a loss, in the form of ``metrics.jsonl``.

        A loss or a gradient norm that is not finite is None. Skipped steps count up from the first
        record on, and stay 0 where the log does not count them.
        """
        with_loss = [record for record in self.train if record.loss is not None]
        has_scale = all(record.loss_scale is not None for record in with_loss)
        rows = []
        skipped_steps = 0
        for record in self.train:
            skipped = record.skipped or 0
            skipped_steps += skipped
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
                    "skipped": skipped > 0,
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
    """Return at which steps a loss was not finite, and from which on if none after it was.

    Args:
        finite_at: Step of each record -> whether its loss is finite, in the order of the steps.

    Returns:
        "at step 21", "at steps 21 and 25", "from step 21 on" or "at step 21 and from step 30 on";
        None where every loss is finite.
    """
    between: list[int] = []
    at_end: list[int] = []
    for step, is_finite in finite_at.items():
        if is_finite:
            between.extend(at_end)
            at_end.clear()
        else:
            at_end.append(step)
    parts = []
    if between:
        shown = [str(step) for step in between[:MAX_SHOWN_STEPS]]
        if len(between) > MAX_SHOWN_STEPS:
            shown.append(f"{len(between) - MAX_SHOWN_STEPS} more")
        noun = "step"
        if len(shown) > 1:
            noun = "steps"
            shown[-2:] = [f"{shown[-2]} and {shown[-1]}"]
        parts.append(f"at {noun} {', '.join(shown)}")
    if at_end:
        parts.append(f"from step {at_end[0]} on")
    return " and ".join(parts) or None


def _drop_non_finite(value: float | None) -> float | None:
    """Return a finite value as it is, None for any other."""
    if value is None or not math.isfinite(value):
        return None
    return value


def _describe_not_finite(record: LogRecord) -> str | None:
    """Return where a gradient was not finite, as far as a log says it."""
    if record.grad_norm is None or math.isfinite(record.grad_norm):
        return None
    return f"at step {record.step}"


def make_unique_names(logs: Sequence[RunLog]) -> list[str]:
    """Return a name for each log: logs of equal names get the nearest folder that differs.

    Where no single folder does, the whole path stands for the name.
    """
    logs_of: dict[str, list[RunLog]] = {}
    for log in logs:
        logs_of.setdefault(log.name, []).append(log)
    names = []
    for log in logs:
        names.append(_make_unique_name(log, logs_of[log.name]))
    return names


def _make_unique_name(log: RunLog, alike: Sequence[RunLog]) -> str:
    """Return the name of a log that others have too."""
    if len(alike) == 1:
        return log.name
    depth = min(len(other.path.parts) for other in alike)
    for back in range(2, depth + 1):
        folders = {other.path.parts[-back] for other in alike}
        if len(folders) == len(alike):
            return log.path.parts[-back]
    return str(log.path)
