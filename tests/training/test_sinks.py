"""TensorBoard, MLflow and Weights & Biases get the values of a run's own files; nothing is sent over a network."""

from __future__ import annotations

import json
import struct

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bridge.errors import RunConfigError
from bridge.training.loop import pretrain
from bridge.training.metrics import Metrics, Sink, ValidationRecord
from tests.training.loop_tiny import losses, tiny


def trained(run_dir, **sinks):
    """Train with sinks; return the training losses and the names of the values."""
    config = tiny(low="tensorwise", train={"train_iters": 2, "eval_iters": 1})
    config.logging.quantisation_interval = 2
    vars(config.logging).update(sinks)
    pretrain(config, run_dir=run_dir)
    return losses(run_dir)


def test_tensorboard_has_the_losses_and_the_distribution_of_the_errors(tmp_path):
    expected = trained(tmp_path, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [one.value for one in events.Scalars("train/loss")] == pytest.approx(expected)
    (underflow,) = events.Scalars("quantisation/grad_output_underflow_max")
    assert (underflow.step, 0 <= underflow.value < 1) == (2, True)
    (ratios,) = events.Histograms("quantisation/weight_db")
    assert ratios.histogram_value.num == 2 * 4  # layers, modules
    assert "train/not_finite" not in events.Tags()["scalars"]


def test_mlflow_has_the_losses(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow-skinny, of the extra `sinks`")
    pytest.importorskip("sqlalchemy", reason="needs sqlalchemy, of the extra `sinks`")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for store in (f"sqlite:///{tmp_path / 'mlflow.db'}", (tmp_path / "mlruns").as_uri()):
        folder = tmp_path / store.partition(":")[0]
        expected = trained(folder, mlflow=store)
        client = mlflow.MlflowClient(tracking_uri=store)
        (experiment,) = [one for one in client.search_experiments() if one.name == "precision-bridge"]
        (run,) = client.search_runs([experiment.experiment_id])
        assert (run.info.run_name, run.info.status) == (folder.name, "FINISHED")
        assert [one.value for one in client.get_metric_history(run.info.run_id, "train/loss")] == expected
        assert "quantisation/input_db_mean" in run.data.metrics


def wandb_records(file):
    """Yield the records of an offline run: a LevelDB log in blocks of 32 KiB, after a header of 7 bytes."""
    data, place, parts = file.read_bytes(), 7, []
    while place + 7 <= len(data):
        rest = -place % 2**15
        if rest < 7:
            place += rest
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts.append(data[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def test_wandb_has_the_losses(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs wandb, of the extra `sinks`")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    expected = trained(tmp_path, wandb="a-project")
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    values: dict[str, list] = {}
    for data in wandb_records(file):
        for item in Record.FromString(data).history.item:
            values.setdefault("/".join(item.nested_key) or item.key, []).append(json.loads(item.value_json))
    assert values["train/loss"] == expected
    assert values["quantisation/weight_db/_type"] == ["histogram"]


def test_a_sink_out_of_reach_is_left_out_and_one_that_cannot_be_opened_is_refused(tmp_path, caplog, monkeypatch):
    def away(*_):
        raise ConnectionError("no route")

    with (tmp_path / "metrics.jsonl").open("w") as lines:
        metrics = Metrics(tmp_path, lines, [Sink("mlflow", away, away)])
        for step in (7, 8):
            metrics.add(ValidationRecord(step=step, loss=1.0))
    assert caplog.messages == ["logging.mlflow: takes no values from step 7 on: no route"]
    with pytest.raises(RunConfigError, match=r"^logging\.mlflow: (needs the package|cannot be opened)"):
        trained(tmp_path, mlflow="nonsense://store")
