"""Golden values of Megatron-LM's functional tests, with numbers of gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bridge.errors import UnreadFileError
from bridge.read.logs.files import read_logs

LOSSES = {"1": 11.04733, "2": 11.03572, "3": 9.58761}
TIMES = {"1": "nan", "2": 1.2, "3": 1.1}


def golden(**metrics: dict[str, object]) -> str:
    content = {}
    for name, values in metrics.items():
        content[name] = {"start_step": 1, "end_step": 3, "step_interval": 1, "values": values}
    return json.dumps(content)


def test_golden_values_have_the_arguments_of_the_test_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "golden_values_dev_dgx_h100.json"
    path.write_text(golden(**{"lm loss": LOSSES, "iteration-time": TIMES, "num-zeros": LOSSES}))
    (tmp_path / "model_config.yaml").write_text("MODEL_ARGS:\n  --bf16: true\n  --train-iters: 50\n  --seed: 7\n")
    (log,) = read_logs(path)
    assert [(record.step, record.loss, record.seconds_per_step) for record in log.train] == [
        (1, 11.04733, None),
        (2, 11.03572, 1.2),
        (3, 9.58761, 1.1),
    ]
    assert (log.source, log.is_sampled, log.train_iters, log.get_seed()) == ("a file of golden values", True, 50, 7)
    assert log.described_by == tmp_path / "model_config.yaml"
    assert log.missing == ["gradient norm", "loss scale", "skipped steps", "learning rate"]


def test_golden_values_without_a_loss_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "golden_values.json"
    path.write_text(golden(**{"num-zeros": LOSSES}))
    with pytest.raises(UnreadFileError, match="a file of golden values must have a training loss"):
        read_logs(path)


def test_a_folder_of_golden_values_has_a_run_for_each_file_and_none_for_a_report(tmp_path: Path) -> None:
    for environment in ("dev_dgx_h100", "dev_dgx_gb200"):
        (tmp_path / f"golden_values_{environment}.json").write_text(golden(**{"lm loss": LOSSES}))
    (tmp_path / "golden_values_dev_dgx_h100.report.json").write_text("{}")
    assert [log.path.name for log in read_logs(tmp_path)] == [
        "golden_values_dev_dgx_gb200.json",
        "golden_values_dev_dgx_h100.json",
    ]
