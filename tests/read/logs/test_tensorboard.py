"""TensorBoard folders, written by the real writer under the names of Megatron-LM and NeMo-RL."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from bridge.errors import UnreadFileError
from bridge.read.logs.files import read_logs


def write(folder: Path, **series: dict[int, float]) -> None:
    writer = SummaryWriter(str(folder))
    for name, values in series.items():
        for step, value in values.items():
            writer.add_scalar(name, value, step)
    writer.close()


def test_a_folder_has_the_figures_that_megatron_lm_writes(tmp_path: Path) -> None:
    names = {"lm loss": 3.0, "grad-norm": 1.5, "learning-rate": 1e-4, "loss-scale": 1.0, "iteration-time": 2.0}
    series = {name: {1: value, 2: value / 2} for name, value in names.items()}
    write(
        tmp_path / "run-a" / "tensorboard",
        **series,
        **{"lm loss validation": {2: 2.5}, "lm loss vs samples": {32: 3.0}},
    )
    (log,) = read_logs(tmp_path / "run-a" / "tensorboard")
    assert (log.source, log.name, log.is_sampled) == ("a TensorBoard folder", "run-a", True)
    first, second = log.train
    assert (first.step, first.loss, first.grad_norm, first.loss_scale, first.seconds_per_step) == (
        1,
        3.0,
        1.5,
        1.0,
        2.0,
    )
    assert second.learning_rate == pytest.approx(5e-5)
    assert log.validation == ((2, 2.5),)
    assert log.missing == ["skipped steps", "arguments (precision and seed)"]


def test_restarts_of_a_run_are_one_run_and_its_nan_is_kept(tmp_path: Path) -> None:
    write(tmp_path, **{"lm loss": {1: 3.0, 2: 2.9}})
    write(tmp_path, **{"lm loss": {3: math.nan}})
    (log,) = read_logs(tmp_path)
    assert [record.step for record in log.train] == [1, 2, 3]
    assert math.isnan(log.train[-1].loss)


def test_each_folder_with_a_loss_is_a_run_and_one_with_other_metrics_is_none(tmp_path: Path) -> None:
    for name in ("bf16", "fp8"):
        write(tmp_path / name, **{"train/loss": {1: 3.0}})
    write(tmp_path / "hparams", hp_metric={0: -1.0})
    assert [log.name for log in read_logs(tmp_path)] == ["bf16", "fp8"]


def test_a_scalar_in_the_form_of_tensorflow_2_is_read(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path))
    writer.add_scalar("lm loss", 3.0, 1, new_style=True)
    writer.close()
    (log,) = read_logs(tmp_path)
    assert log.train[0].loss == 3.0
    (file,) = tmp_path.iterdir()
    assert read_logs(file)[0].train == log.train


def test_a_folder_without_a_loss_is_refused_with_the_metrics_that_it_has(tmp_path: Path) -> None:
    write(tmp_path, accuracy={1: 0.5})
    with pytest.raises(
        UnreadFileError, match=r"must have a training loss \('lm loss', .*\), got the metrics 'accuracy'\."
    ):
        read_logs(tmp_path)
