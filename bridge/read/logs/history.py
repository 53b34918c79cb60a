"""Histories that were exported as a table: those of W&B and of MLflow, as CSV or JSON.

    W&B, a chart's export    Step, RUN - METRIC, RUN - METRIC__MIN, RUN - METRIC__MAX; several runs
    W&B, `run.scan_history`  _step and a column per metric, in a CSV, a list, or a line of JSON each
    MLflow, a chart's export run_id, key, value, timestamp, step: a row per value; several runs
    MLflow, its REST answer  {"metrics": [{"key": ..., "value": ..., "step": ...}]}

`run.history()` of W&B returns 500 of the rows, so that two runs may have no step in common.

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

WANDB, MLFLOW = "a history of W&B", "a history of MLflow"
STEP_COLUMNS = ("_step", "Step", "step", "iteration", "global_step")
"""Columns with the step, the most telling one first."""
BOUND_SUFFIXES = ("__MIN", "__MAX")
"""Ends of the columns in which W&B's chart has the range of a group."""
MLFLOW_COLUMNS = ("key", "value", "step")
HistoryRow = Mapping[str, Any]


def parse_csv(text: str, path: Path) -> list[RunLog] | None:
    """Return the runs of a CSV; None where its columns are those of no history."""
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
    """Return the runs of parsed JSON; None where it has no form of a history."""
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
    """Return the values of a file with a JSON value in each line; None where it has another form."""
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
    """Return the runs of rows, each with a step.

    Raises:
        UnreadFileError: No run has a training loss.
    """
    rows = list(rows)
    if rows and all(name in rows[0] for name in MLFLOW_COLUMNS):
        source, runs = MLFLOW, _group_values(rows)
    else:
        source, runs = WANDB, _group_columns(rows)
    logs = []
    for name, series in runs.items():
        if has_loss(series):
            logs.append(make_run_log(series, path=path, source=source, name=name))
    if not logs:
        names: dict[str, Mapping[int, float]] = {}
        for series in runs.values():
            names.update(series)
        raise make_no_loss_error(path, source, names)
    return logs


def _group_values(rows: Iterable[HistoryRow]) -> dict[str, Series]:
    """Return run -> its series, of rows with one value each."""
    runs: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        step, value = parse_step(row["step"]), parse_number(row["value"])
        if step is None or value is None:
            continue
        of_run = runs.setdefault(str(row.get("run_id") or ""), {})
        of_run.setdefault(str(row["key"]), {})[step] = value
    if len(runs) == 1:  # an id says nothing that the file's name does not
        return {"": next(iter(runs.values()))}
    return dict(runs)


def _group_columns(rows: Iterable[HistoryRow]) -> dict[str, Series]:
    """Return run -> its series, of rows with a column per metric, or per run and metric."""
    runs: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        step = None
        for name in STEP_COLUMNS:
            step = parse_step(row.get(name))
            if step is not None:
                break
        if step is None:
            continue
        for column, cell in row.items():
            if column is None or column in STEP_COLUMNS or column.endswith(BOUND_SUFFIXES):
                continue
            value = parse_number(cell)
            if value is None:
                continue
            run, dash, metric = column.rpartition(" - ")
            if not dash:
                run, metric = "", column
            runs.setdefault(run, {}).setdefault(metric, {})[step] = value
    return dict(runs)


def _transpose_columns(content: Mapping[str, Any]) -> list[HistoryRow]:
    """Return the rows of a table whose columns are mappings from the row's index, as pandas has it."""
    rows: dict[str, dict[str, Any]] = {}
    for column, cells in content.items():
        if isinstance(cells, dict):
            for index, cell in cells.items():
                rows.setdefault(index, {})[column] = cell
    return list(rows.values())
