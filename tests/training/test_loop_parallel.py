"""Several processes: real gloo, compared with one process."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import pytest

from bridge.training.loop import pretrain
from tests import warm
from tests.training.loop_tiny import ROOT, in_two_processes, losses, records, tiny

FP32 = {"mode": "fp32"}
BF16 = {"mode": "bf16"}
PLANS = {
    "dp2": FP32,
    "dp2-bf16": BF16,
    "dp2-sharded": {**FP32, "sharded": True},
    "dp2-sharded-overlapped": {
        **FP32,
        "sharded": True,
        "ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20000},
        "optimizer": {"overlap_param_gather": True},
    },
    "dp2-fp16": {
        "mode": "fp16",
        "optimizer": {"initial_loss_scale": 2.0**24, "hysteresis": 1},
        "train": {"train_iters": 12},
    },
    "tp2": {**FP32, "model": {"tensor_model_parallel_size": 2}},
    "tp2-sp": {**FP32, "model": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
    "cp2": {**FP32, "model": {"context_parallel_size": 2, "cp_comm_type": "all_gather"}},
    "pp2": {**FP32, "model": {"pipeline_model_parallel_size": 2}},
    "pp2-interleaved": {
        **FP32,
        "model": {
            "num_layers": 4,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        },
    },
    "pp2-bf16-tied": {
        **BF16,
        "model": {"pipeline_model_parallel_size": 2, "share_embeddings_and_output_weights": True},
    },
}


@pytest.fixture(scope="module")
def parallel(tmp_path_factory):
    return in_two_processes(PLANS, tmp_path_factory.mktemp("parallel"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the folder of the same run in one process, in FP32, by the number of its layers."""

    @functools.cache
    def run(layers):
        folder = tmp_path_factory.mktemp("alone")
        pretrain(tiny("fp32", model={"num_layers": layers}), run_dir=folder)
        return folder

    return run


@pytest.mark.parametrize(
    "name", ["dp2", "dp2-sharded", "dp2-sharded-overlapped", "tp2", "tp2-sp", "cp2", "pp2", "pp2-interleaved"]
)
def test_two_processes_train_as_one_does(name, parallel, alone):
    one = alone(PLANS[name].get("model", {}).get("num_layers", 2))
    assert losses(parallel / name) == pytest.approx(losses(one), rel=1e-5)
    norms = [[record["grad_norm"] for record in records(folder)] for folder in (parallel / name, one)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.parametrize("name", ["pp2-bf16-tied", "dp2-bf16"])
def test_other_layouts_learn(name, parallel):
    assert losses(parallel / name)[-1] < losses(parallel / name)[0] - 0.4


def test_loss_of_the_last_stage_reaches_the_first_rank(parallel):
    assert all(loss is not None and 1 < loss < 6 for loss in losses(parallel / "pp2"))
    assert len(losses(parallel / "pp2")) == 6


def test_loss_scale_backs_off_on_both_ranks(parallel):
    steps = records(parallel / "dp2-fp16")
    assert steps[0]["skipped"]
    assert not all(step["skipped"] for step in steps)


def test_sharded_optimizer_holds_half_of_the_master_weights_on_each_rank(parallel):
    def master_bytes(name, rank):
        rows = json.loads((parallel / name / f"census-{rank}.json").read_text())
        return sum(row["bytes"] for row in rows if row["kind"] == "optimizer state")

    whole = master_bytes("dp2", 0)
    assert master_bytes("dp2-sharded", 0) + master_bytes("dp2-sharded", 1) == pytest.approx(whole, rel=0.01)
    assert master_bytes("dp2-sharded", 0) < 0.6 * whole


@pytest.mark.slow
def test_torchrun_starts_the_same_run(parallel, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"dp2": PLANS["dp2"]}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [*command, "-m", "tests.training.loop_tiny", str(plan)]
    options = {"cwd": ROOT, "env": {**os.environ, "OMP_NUM_THREADS": "1"}, "timeout": warm.LIMIT_SECONDS}
    done = subprocess.run(words, **options, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert losses(tmp_path / "dp2") == losses(parallel / "dp2")


def test_processes_that_do_not_fill_the_layout_are_refused(tmp_path):
    from bridge.errors import RunConfigError

    config = tiny(model={"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2})
    with pytest.raises(RunConfigError) as raised:
        pretrain(config, run_dir=tmp_path)
    assert str(raised.value) == (
        "model: the number of processes must be a multiple of tensor_model_parallel_size 2 x "
        "pipeline_model_parallel_size 2 = 4, got 1 (WORLD_SIZE). Start the run with torchrun --nproc-per-node=4, or "
        "change the parallel sizes."
    )
