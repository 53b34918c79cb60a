"""Reads histories of W&B and MLflow that were exported as CSV or JSON.

    W&B, a chart's export     Step, RUN - METRIC, RUN - METRIC__MIN, RUN - METRIC__MAX; several runs
    W&B, `run.scan_history`   _step and a column for each metric, as CSV, a list, or lines of JSON
    MLflow, a chart's export  run_id, key, value, timestamp, step: a row for each value; several runs
    MLflow, its REST answer   {"metrics": [{"key": ..., "value": ..., "step": ...}]}

`run.history()` of W&B returns a sample of 500 rows. So two runs may have no step in common.

Source: W&B 0.31.0 wandb/apis/public/runs.py Run.history and scan_history, and exports of charts in
public repositories (`RUN - METRIC__MIN`); MLflow 00b98f7d
mlflow/server/js/src/experiment-tracking/components/MetricsPlotPanel.tsx convertMetricsToCsv.
"""

import csv
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bridge.errors import UnreadFileError
from bridge.read.logs.series import (
    Series,
    has_loss,
    make_no_loss_error,
    make_run_log,
    parse_number,
    parse_step,
)
from bridge.runtime.audit.run_log import RunLog

WANDB = "a history of W&B"
MLFLOW = "a history of MLflow"
STEP_COLUMNS = ("_step", "Step", "step", "iteration", "global_step")
"""Columns with the step. The first of them that a row has counts."""
BOUND_SUFFIXES = ("__MIN", "__MAX")
"""Ends of the names of columns in which W&B's chart has the range of a group of runs."""
MLFLOW_COLUMNS = ("key", "value", "step")
"""Columns that every history of MLflow has."""
HistoryRow = Mapping[str, Any]
"""Name of a column -> its cell."""


def parse_csv(text: str, path: Path) -> list[RunLog] | None:
    """Return the runs of a CSV; None if it has no column with a step.

    Raises:
        UnreadFileError: The text is not a CSV, or has no training loss.
    """
    reader = csv.DictReader(io.StringIO(text))
    try:
        columns = reader.fieldnames or ()
        if not ({*STEP_COLUMNS} & {*columns}):
            return None
        rows = list(reader)
    except csv.Error as error:
        raise UnreadFileError(
            f"{path}: must be a CSV of a history, got {error}. Export it again."
        ) from None
    return make_run_logs(rows, path)


def parse_history(content: Any, path: Path) -> list[RunLog] | None:
    """Return the runs of parsed JSON; None if it does not have the form of a history.

    Raises:
        UnreadFileError: The history has no training loss.
    """
    if isinstance(content, dict):
        metrics = content.get("metrics")
        if isinstance(metrics, list):
            content = metrics
        elif any(isinstance(content.get(name), dict) for name in STEP_COLUMNS):
            content = _transpose_columns(content)
    if not isinstance(content, list) or not content:
        return None
    rows = [row for row in content if isinstance(row, dict)]
    if len(rows) < len(content) or not any({*row} & {*STEP_COLUMNS} for row in rows):
        return None
    return make_run_logs(rows, path)


def parse_json_lines(text: str) -> list[Any] | None:
    """Return the values of a file with a JSON value in each line; None if it has another form."""
    values = []
    for line in text.splitlines():
        if not line.strip():
            continue
        try:
            values.append(json.loads(line))
        except (ValueError, RecursionError):
            return None
    return values


def make_run_logs(rows: Iterable[HistoryRow], path: Path) -> list[RunLog]:
    """Return the runs of the rows of a table that have a training loss.

    Raises:
        UnreadFileError: No run has a training loss.
    """
    rows = list(rows)
    if rows and all(name in rows[0] for name in MLFLOW_COLUMNS):
        source = MLFLOW
        series_by_run = _group_values(rows)
    else:
        source = WANDB
        series_by_run = _group_columns(rows)
    logs = []
    for run_name, series in series_by_run.items():
        if has_loss(series):
            logs.append(make_run_log(series, path=path, source=source, name=run_name))
    if not logs:
        all_series: dict[str, Mapping[int, float]] = {}
        for series in series_by_run.values():
            all_series.update(series)
        raise make_no_loss_error(path, source, all_series)
    return logs


def _group_values(rows: Iterable[HistoryRow]) -> dict[str, Series]:
    """Return name of a run -> its series, for a table with a row for each value.

    A single run gets the name "", since the name of its file is clearer than its id.
    """
    runs: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        step = parse_step(row["step"])
        value = parse_number(row["value"])
        if step is None or value is None:
            continue
        series = runs.setdefault(str(row.get("run_id") or ""), {})
        series.setdefault(str(row["key"]), {})[step] = value
    if len(runs) == 1:
        return {"": next(iter(runs.values()))}
    return dict(runs)


def _group_columns(rows: Iterable[HistoryRow]) -> dict[str, Series]:
    """Return name of a run -> its series, for a table with a column for each metric.

    A column may be named "RUN - METRIC". If a table has a single run, its columns have only the
    name of the metric, and the run gets the name "".
    """
    runs: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        step = _find_step(row)
        if step is None:
            continue
        for column, cell in row.items():
            # csv.DictReader puts surplus cells of a row under the key None.
            if column is None or column in STEP_COLUMNS or column.endswith(BOUND_SUFFIXES):
                continue
            value = parse_number(cell)
            if value is None:
                continue
            run_name, _, metric = column.rpartition(" - ")
            runs.setdefault(run_name, {}).setdefault(metric, {})[step] = value
    return dict(runs)


def _find_step(row: HistoryRow) -> int | None:
    """Return the step of a row; None if it has none."""
    for name in STEP_COLUMNS:
        step = parse_step(row.get(name))
        if step is not None:
            return step
    return None


def _transpose_columns(content: Mapping[str, Any]) -> list[HistoryRow]:
    """Return the rows of a table that pandas wrote: name of a column -> index of a row -> cell."""
    rows: dict[str, dict[str, Any]] = {}
    for column, cells in content.items():
        if isinstance(cells, dict):
            for index, cell in cells.items():
                rows.setdefault(index, {})[column] = cell
    return list(rows.values())
