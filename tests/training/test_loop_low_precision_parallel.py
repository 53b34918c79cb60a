"""Training with emulated FP8 and FP4 matmuls in two processes, compared with one."""

from __future__ import annotations

import functools

import pytest

from bridge.runtime.audit.record import Record
from bridge.training.loop import pretrain
from tests.training.grid import slow
from tests.training.loop_tiny import SIX, in_two_processes, losses, tiny, trace

SCHEDULE = {"lr_decay_iters": 6, "eval_iters": 0}
INTERLEAVED = {
    "sharded": True,
    "low": "tensorwise",
    "stored": True,
    "model": {
        **SIX,
        "num_layers": 8,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
    },
}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 32,
    "qk_layernorm": True,
}
EXPERTS = {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall"}
UNCLIPPED = {"clip_grad": 0.0}
"""No norm over all stages, the one number of a step that is summed in another order than in one process."""
PLANS = {
    "dp2-tensorwise": {"sharded": True, "low": "tensorwise", "stored": True},
    "dp2-delayed": {"sharded": True, "low": "delayed", "stored": True},
    "dp2-blockwise": {"sharded": True, "low": "blockwise", "stored": True},
    "dp2-mxfp8": {"sharded": True, "low": "mxfp8", "stored": True},
    "dp2-nvfp4": {"sharded": True, "low": "nvfp4", "stored": True},
    "dp2-overlapped": {
        "sharded": True,
        "low": "tensorwise",
        "stored": True,
        "ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20000},
        "optimizer": {"overlap_param_gather": True},
    },
    "tp2-tensorwise": {"low": "tensorwise", "model": {"tensor_model_parallel_size": 2}},
    "tp2-sp-tensorwise": {
        "low": "tensorwise",
        "model": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    },
    "tp2-sp-delayed": {"low": "delayed", "model": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
    "pp2-tensorwise": {
        "low": "tensorwise",
        "model": {**SIX, "pipeline_model_parallel_size": 2},
        "optimizer": UNCLIPPED,
        "train": {"train_iters": 2},
    },
    "pp2-latent": {
        "low": "tensorwise",
        "model": {**LATENT, "pipeline_model_parallel_size": 2},
        "optimizer": UNCLIPPED,
        "train": {**SCHEDULE, "train_iters": 4},
    },
    "ep2-mxfp8": {
        "sharded": True,
        "low": "mxfp8",
        "stored": True,
        "model": {**EXPERTS, "expert_model_parallel_size": 2},
        "train": {"train_iters": 4},
    },
    "vpp2-modules": {
        "low": "tensorwise",
        "rows": [
            {"select": {"layers": [1, -1], "module": "linear_fc2"}, "precision": "mxfp8"},
            {"select": "decoder.layers.3.*", "precision": "bf16"},
        ],
        "model": {**INTERLEAVED["model"], "first_last_layers_bf16": False},
        "train": {"train_iters": 2},
    },
    "vpp2-whole": {**INTERLEAVED, "train": {**SCHEDULE, "train_iters": 6}},
    "vpp2-first": {**INTERLEAVED, "train": {**SCHEDULE, "train_iters": 3}, "save": "checkpoints"},
    "vpp2-resumed": {**INTERLEAVED, "train": {**SCHEDULE, "train_iters": 6}, "load": "checkpoints"},
    "pp2-delayed": {"low": "delayed", "model": {"num_layers": 4, "pipeline_model_parallel_size": 2}},
}


FAST = (
    "dp2-delayed",
    "dp2-overlapped",
    "tp2-sp-tensorwise",
    "pp2-tensorwise",
    "pp2-latent",
    "ep2-mxfp8",
    "vpp2-modules",
)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Return the folder of a run by its name. One launch makes the fast ones, another one the rest."""

    @functools.cache
    def made(fast):
        plans = {name: plan for name, plan in PLANS.items() if (name in FAST) is fast}
        return in_two_processes(plans, tmp_path_factory.mktemp("parallel"))

    return lambda name: made(name in FAST) / name


@pytest.mark.parametrize(
    "name", [name if name in FAST else slow(name) for name in PLANS if name.startswith(("dp2", "tp2"))]
)
def test_two_processes_train_as_one_does(name, run_of, tmp_path):
    alone = {key: value for key, value in PLANS[name].items() if key not in ("model", "ddp", "optimizer")}
    pretrain(tiny(**alone), run_dir=tmp_path)
    assert losses(run_of(name)) == pytest.approx(losses(tmp_path), rel=3e-3)
    assert losses(run_of(name))[0] == pytest.approx(losses(tmp_path)[0], rel=2e-4)


@pytest.mark.parametrize("name", ["pp2-tensorwise", "pp2-latent"])
def test_stages_without_clipping_train_bit_for_bit_as_one_process_does(name, run_of, tmp_path):
    model = {key: value for key, value in PLANS[name]["model"].items() if key != "pipeline_model_parallel_size"}
    pretrain(tiny(**{**PLANS[name], "model": model}), run_dir=tmp_path)
    assert losses(run_of(name)) == losses(tmp_path)


def test_experts_and_other_weights_are_gathered_after_both_are_updated(run_of, tmp_path):
    pretrain(tiny(**{**PLANS["ep2-mxfp8"], "model": EXPERTS}), run_dir=tmp_path)
    assert losses(run_of("ep2-mxfp8")) == pytest.approx(losses(tmp_path), rel=3e-3)


def layers_of(folder, scheme):
    """Return the layers with a GEMM in a scheme, of all stages."""
    return {row.layer for row in Record.read(folder / "record.json").gemms if row.scheme == scheme}


def test_layers_are_counted_over_pipeline_stages(run_of):
    assert layers_of(run_of("pp2-tensorwise"), "tensorwise") == {"2", "3", "4", "5"}
    assert layers_of(run_of("pp2-tensorwise"), "none") == {"1", "6", "output"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pp2-delayed", "vpp2-whole"])
def test_stages_learn(name, run_of):
    assert losses(run_of(name))[-1] < losses(run_of(name))[0] - 0.5


@pytest.mark.slow
def test_layers_are_counted_over_interleaved_stages(run_of):
    assert layers_of(run_of("vpp2-whole"), "tensorwise") == {*"234567"}
    assert layers_of(run_of("vpp2-whole"), "none") == {"1", "8", "output"}


@pytest.mark.slow
def test_interleaved_stages_resume_exactly(run_of):
    assert trace(run_of("vpp2-first")) + trace(run_of("vpp2-resumed")) == trace(run_of("vpp2-whole"))


def test_rows_that_name_layers_choose_them_in_every_chunk_of_every_stage(run_of):
    rows = Record.read(run_of("vpp2-modules") / "record.json").gemms
    schemes = {(row.layer, row.module): row.scheme for row in rows if row.layer != "output"}
    others = {key: scheme for key, scheme in schemes.items() if scheme != "tensorwise"}
    names = ("linear_fc1", "linear_fc2", "linear_proj", "linear_qkv")
    assert others == {("2", "linear_fc2"): "mxfp8", ("8", "linear_fc2"): "mxfp8"} | {
        ("4", name): "none" for name in names
    }
