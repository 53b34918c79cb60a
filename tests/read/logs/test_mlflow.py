"""A run in MLflow's file store, in the form of mlflow/store/tracking/file_store.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.errors import UnreadFileError
from bridge.read.logs.files import read_logs


def write(run: Path, name: str = "sunny-run-7", **metrics: str) -> None:
    for metric, lines in metrics.items():
        file = run / "metrics" / metric
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(lines)
    (run / "meta.yaml").write_text(f"run_id: {run.name}\nrun_name: {name}\nstatus: 3\n")


def test_a_run_has_a_file_for_each_metric_slashes_included(tmp_path: Path) -> None:
    run = tmp_path / "0" / "abc"
    write(run, **{"lm loss": "17 3.0 1\n18 2.0 2\n19 1.", "throughput/tflops_per_device": "17 450.5 1\n"})
    for path in (run, run / "metrics", tmp_path):
        (log,) = read_logs(path)
        assert (log.source, log.name) == ("an MLflow run", "sunny-run-7")
        assert [(record.step, record.loss) for record in log.train] == [(1, 3.0), (2, 2.0)]
        assert log.train[0].tflops_per_gpu == 450.5


def test_a_run_that_mlflow_itself_wrote_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra [sinks]")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(tracking_uri=f"file:{tmp_path}")
    run = client.create_run(client.create_experiment("runs"), run_name="bf16-run").info.run_id
    client.log_metric(run, "lm loss", 3.0, step=1)
    client.log_metric(run, "grad-norm", 1.5, step=1)
    (log,) = read_logs(tmp_path)
    assert (log.name, log.train[0].loss, log.train[0].grad_norm) == ("bf16-run", 3.0, 1.5)


def test_a_run_without_a_loss_is_refused(tmp_path: Path) -> None:
    write(tmp_path, accuracy="17 0.5 1\n")
    with pytest.raises(UnreadFileError, match="an MLflow run must have a training loss"):
        read_logs(tmp_path)
