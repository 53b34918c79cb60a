"""`make_run_log`: makes a `RunLog` of the series of a log, by the names in `metrics.yaml`.

A series has the values of a metric by step. Every format of a log is read as series. The table
`metrics.yaml` lists the names under which trainers log the loss, the gradient norm and so on.
"""

import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from bridge.errors import UnreadFileError
from bridge.precision.package_yaml import load_package_yaml
from bridge.runtime.audit.run_log import LogRecord, RunLog

Series = Mapping[str, Mapping[int, float]]
"""Name of a metric -> step -> value."""

MAX_SHOWN_NAMES = 6
"""Metrics that a refusal names."""
RECORD_FIGURES = (
    "loss",
    "grad_norm",
    "loss_scale",
    "learning_rate",
    "skipped",
    "seconds_per_step",
    "tokens_per_second",
    "tflops_per_gpu",
)
"""Metrics of a training record."""


@cache
def _load_metric_names() -> dict[str, list[dict[str, Any]]]:
    """Return the content of `metrics.yaml`: metric -> rows with the names of its series."""
    file = resources.files("bridge.read.logs").joinpath("metrics.yaml")
    table: dict[str, list[dict[str, Any]]] = load_package_yaml(file)
    return table


def get_figure(series: Series, figure: str) -> dict[int, float]:
    """Return a metric by step, in its unit. Empty if no series has a name of the metric."""
    for row in _load_metric_names()[figure]:
        values = series.get(row["name"])
        if values:
            factor = row.get("times", 1)
            return {step: value * factor for step, value in values.items()}
    return {}


def has_loss(series: Series) -> bool:
    """Return whether one of the series is a training loss."""
    return bool(get_figure(series, "loss"))


def make_run_log(
    series: Series,
    *,
    path: Path,
    source: str,
    name: str = "",
    is_sampled: bool = True,
    train_iters: int | None = None,
    arguments: Mapping[str, Any] | None = None,
    described_by: Path | None = None,
    notes: tuple[str, ...] = (),
) -> RunLog:
    """Return the run of the series of a log.

    Args:
        series: Every metric of the log.
        path: The file or folder that was read.
        source: The kind of the log, with its article: "a log of NeMo-RL".
        name: The name of the run in the log. Empty: the name of the file or folder is used.
        is_sampled: Whether a loss is about a single step. False: it is a mean over several steps.
        train_iters: The planned number of steps of the run. None: not known.
        arguments: Name of an argument of Megatron-LM -> its value.
        described_by: The file with these arguments. None: there are no arguments.
        notes: Sentences about parts of the log that do not count.

    Raises:
        UnreadFileError: None of the series is a training loss.
    """
    figures = {figure: get_figure(series, figure) for figure in RECORD_FIGURES}
    losses = figures["loss"]
    if not losses:
        raise make_no_loss_error(path, source, series)
    # TensorBoard and W&B count from 0. Step 0 is before the first update, and is not compared.
    steps = {step for figure in ("loss", "skipped") for step in figures[figure] if step > 0}
    records = []
    for step in sorted(steps):
        values = {figure: by_step.get(step) for figure, by_step in figures.items()}
        skipped = values.pop("skipped")
        records.append(LogRecord(step=step, skipped=parse_step(skipped), **values))
    if all(record.loss is None for record in records):
        raise make_no_loss_error(path, source, series)
    validation = get_figure(series, "validation_loss")
    return RunLog(
        path=path,
        name=name or path.stem,
        source=source,
        train=tuple(records),
        validation=tuple(sorted(validation.items())),
        is_sampled=is_sampled,
        train_iters=train_iters,
        arguments=arguments or {},
        described_by=described_by,
        is_policy=bool(get_figure(series, "reward")),
        notes=notes,
    )


def parse_number(cell: object) -> float | None:
    """Return a cell of a log as a number. None if it is empty or text. "NaN" is a number."""
    if isinstance(cell, bool) or not isinstance(cell, int | float | str):
        return None
    try:
        return float(cell)
    except (ValueError, OverflowError):
        return None


def parse_step(cell: object) -> int | None:
    """Return a cell of a log as a step. None if the cell is not a finite number."""
    value = parse_number(cell)
    if value is None or not math.isfinite(value):
        return None
    return int(value)


def make_no_loss_error(path: Path, source: str, series: Series) -> UnreadFileError:
    """Return the error about a log without a training loss, which names the metrics of the log.

    Args:
        path: The log.
        source: Its kind, with its article.
        series: Its metrics.
    """
    names = list(series)
    shown = ", ".join(map(repr, names[:MAX_SHOWN_NAMES])) or "none"
    if len(names) > MAX_SHOWN_NAMES:
        shown += f" and {len(names) - MAX_SHOWN_NAMES} more"
    known = ", ".join(repr(row["name"]) for row in _load_metric_names()["loss"])
    return UnreadFileError(
        f"{path}: {source} must have a training loss ({known}), got the metrics {shown}. "
        "Give a log with the loss.",
        kind="it has no training loss",
    )
