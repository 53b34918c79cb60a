"""Histories of W&B and of MLflow as they are exported: a CSV of a chart, of a history, JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bridge.read.logs.files import read_logs
from bridge.runtime.audit.run_log import RunLog

HISTORY = [
    {"_step": 1, "_runtime": 4.2, "lm loss": 3.0, "grad-norm": 1.5, "learning-rate": 1e-4},
    {"_step": 2, "_runtime": 8.4, "lm loss": "NaN", "grad-norm": None},
]


def logs_of(tmp_path: Path, name: str, text: str) -> list[RunLog]:
    path = tmp_path / name
    path.write_text(text)
    return read_logs(path)


def columns_of(rows: list[dict[str, object]]) -> dict[str, dict[str, object]]:
    """Return rows as pandas writes a frame to JSON."""
    columns: dict[str, dict[str, object]] = {}
    for index, row in enumerate(rows):
        for name, cell in row.items():
            columns.setdefault(name, {})[str(index)] = cell
    return columns


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("history.csv", ",_step,_runtime,lm loss,grad-norm,learning-rate\n0,1,4.2,3.0,1.5,0.0001\n1,2,8.4,NaN,,\n"),
        ("history.json", json.dumps(HISTORY)),
        ("history.jsonl", "\n".join(map(json.dumps, HISTORY)) + "\n"),
        ("frame.json", json.dumps(columns_of(HISTORY))),
    ],
)
def test_each_form_of_a_history_of_wandb_has_the_same_records(name: str, text: str, tmp_path: Path) -> None:
    (log,) = logs_of(tmp_path, name, text)
    first, second = log.train
    assert log.source == "a history of W&B"
    assert (first.step, first.loss, first.grad_norm, first.learning_rate) == (1, 3.0, 1.5, 1e-4)
    assert second.step == 2
    assert math.isnan(second.loss)
    assert second.grad_norm is None


def test_a_chart_of_wandb_has_several_runs_and_their_ranges_are_left_out(tmp_path: Path) -> None:
    head = "Step,bf16 - lm loss,bf16 - lm loss__MIN,bf16 - lm loss__MAX,fp8 - 2 - lm loss,fp8 - 2 - lm loss__MIN\n"
    bf16, fp8 = logs_of(tmp_path, "chart.csv", head + "1,3.0,2.9,3.1,3.5,3.4\n2,2.0,2.0,2.0,,\n")
    assert (bf16.name, fp8.name) == ("bf16", "fp8 - 2")
    assert [record.loss for record in bf16.train] == [3.0, 2.0]
    assert [record.loss for record in fp8.train] == [3.5]


def test_a_chart_of_mlflow_has_a_row_for_each_value(tmp_path: Path) -> None:
    text = "run_id,key,value,step,timestamp\na,lm loss,3.0,1,17\na,grad-norm,1.5,1,17\na,lm loss,2.0,2,18\n"
    (log,) = logs_of(tmp_path, "metrics.csv", text)
    assert (log.source, log.name) == ("a history of MLflow", "metrics")
    assert [(record.loss, record.grad_norm) for record in log.train] == [(3.0, 1.5), (2.0, None)]
    bf16, fp8 = logs_of(tmp_path, "two.csv", text + "b,lm loss,3.0,1,17\n")
    assert (bf16.name, fp8.name) == ("a", "b")


def test_the_answer_of_mlflow_about_a_metric_is_read(tmp_path: Path) -> None:
    metrics = [{"key": "train/loss", "value": 3.0, "timestamp": 17, "step": "1"}]
    (log,) = logs_of(tmp_path, "answer.json", json.dumps({"metrics": metrics}))
    assert [(record.step, record.loss) for record in log.train] == [(1, 3.0)]
