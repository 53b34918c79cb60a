"""A run in several precisions: what each phase runs in, and that a switch changes nothing else."""

from __future__ import annotations

import pytest

from bridge import get_mixed_precision_config
from bridge.errors import RunConfigError
from bridge.training.config import runtime_config_update
from bridge.training.loop import pretrain
from tests.training.loop_tiny import SIX, tiny, trace

STEPS = {"train_iters": 6, "lr_decay_iters": 6, "eval_iters": 0}
UNSTORED = {"fp8_param_gather": False}
THREE = [
    {"until": 2},
    {"until": 4, "recipe": "fp8_delayed", **UNSTORED, "fp8_amax_history_len": 4},
    {"recipe": "bf16_mixed"},
]
NVFP4 = get_mixed_precision_config("nvfp4").override(fp4_param_gather=False)


def run(folder, precision=NVFP4, schedule=None, *, model=None, train=None, **checkpoint):
    config = tiny(sharded=True, model=model, train={**STEPS, **(train or {})}, **checkpoint)
    config.mixed_precision, config.precision_schedule = precision, schedule
    runtime_config_update(config)
    return pretrain(config, run_dir=folder)


def schemes(phase):
    return {record.layer: record.scheme for record in phase.gemms if record.layer != "output"}


def test_each_phase_multiplies_in_its_own_precision(tmp_path):
    summary = run(tmp_path, schedule=THREE)
    assert [(phase.first, phase.last) for phase in summary.phases] == [(1, 2), (3, 4), (5, 6)]
    assert [set(schemes(phase).values()) for phase in summary.phases] == [{"nvfp4"}, {"delayed"}, {"none"}]
    assert summary.precision == "; then ".join(phase.precision for phase in summary.phases)


def test_a_first_phase_in_bf16_and_kept_layers(tmp_path):
    rows = [{"until": 2}, {"recipe": "fp8_current", **UNSTORED}]
    summary = run(tmp_path, "bf16_mixed", rows, model=SIX)
    first, second = map(schemes, summary.phases)
    assert set(first.values()) == {"none"}
    assert second == {"1": "none", **dict.fromkeys("2345", "tensorwise"), "6": "none"}


@pytest.mark.parametrize(("before", "after"), [(NVFP4, "bf16_mixed"), ("bf16_mixed", NVFP4)])
def test_a_switch_is_a_resume_in_the_other_precision(before, after, tmp_path):
    run(tmp_path / "whole", before, [{"until": 3}, {"recipe": after}])
    saved = str(tmp_path / "checkpoints")
    run(tmp_path / "parts", before, train={"train_iters": 3}, save=saved)
    run(tmp_path / "parts", after, load=saved)
    assert trace(tmp_path / "parts") == trace(tmp_path / "whole")


@pytest.mark.parametrize("step", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_a_resumed_schedule_is_exact(step, tmp_path):
    run(tmp_path / "whole", schedule=THREE)
    saved = str(tmp_path / "checkpoints")
    run(tmp_path / "parts", schedule=THREE, save=saved, save_interval=step)
    pointer = tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt"
    pointer.write_text(f"{step}\n")
    (tmp_path / "parts" / "metrics.jsonl").unlink()
    run(tmp_path / "rest", schedule=THREE, load=saved)
    assert trace(tmp_path / "rest") == trace(tmp_path / "whole")[step:]


def test_a_schedule_without_a_recipe_is_refused(tmp_path):
    with pytest.raises(RunConfigError, match="precision_schedule: needs a recipe of the run"):
        run(tmp_path, None, [{"until": 3}, {"recipe": "bf16_mixed"}])
