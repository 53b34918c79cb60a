"""Kinds of models in two processes: expert, tensor and pipeline parallelism."""

import json

import pytest

from bridge.training.loop import pretrain
from tests.runtime.megatron.test_hybrid_runs import HYBRID
from tests.runtime.megatron.test_model_kinds import EXPERTS, LATENT
from tests.runtime.megatron.test_variants import DELTA
from tests.training.grid import slow
from tests.training.loop_tiny import in_two_processes, losses, tiny

ROUTED = {**EXPERTS, "moe_token_dispatcher_type": "alltoall"}
LOW_RANK = {**LATENT, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_layernorm": True}
SPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
SHORT = {"train_iters": 3, "eval_iters": 1}
MODELS = {
    "experts on two ranks": {"model": {**ROUTED, "expert_model_parallel_size": 2}},
    "experts on two ranks, gathered": {"model": {**EXPERTS, "expert_model_parallel_size": 2}},
    "experts under tensor parallelism": {"model": {**ROUTED, **SPLIT}},
    "latent attention under tensor parallelism": {"model": {**LOW_RANK, **SPLIT}},
    "prediction layers under tensor parallelism": {"model": {"mtp_num_layers": 1, **SPLIT}},
    "prediction layers on the last of two stages": {"model": {"mtp_num_layers": 1, "pipeline_model_parallel_size": 2}},
}
SCHEMES = (None, "tensorwise", slow("delayed"), slow("mxfp8"), slow("nvfp4"))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_kind_learns_in_two_processes(scheme, tmp_path):
    assert_learns(MODELS, scheme, tmp_path)


MAMBA = {**HYBRID, "moe_aux_loss_coeff": 0.01}
STAGES = {"pipeline_model_parallel_size": 2}
OTHERS = {
    "a hybrid under tensor parallelism": {"model": {**MAMBA, **SPLIT}},
    "a hybrid on two stages": {"model": {**MAMBA, **STAGES}},
    "a gated delta net under tensor parallelism": {"model": {**DELTA, **SPLIT}},
    "a gated delta net on two stages": {"model": {**DELTA, **STAGES}},
}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [None, "tensorwise"])
def test_hybrids_and_variants_learn_in_two_processes(scheme, tmp_path):
    assert_learns(OTHERS, scheme, tmp_path)


def assert_learns(models, scheme, tmp_path):
    """The losses of three steps are those of one process: the weights begin alike, only the order of sums differs."""
    mode, tolerance = ("fp32", 1e-5) if scheme is None else ("bf16", 3e-3)
    common = {"mode": mode, "low": scheme, "train": SHORT, "sharded": True}
    runs = {name: {**common, **run} for name, run in models.items()}
    folder = in_two_processes(runs, tmp_path)
    for name, run in runs.items():
        alone = {field: value for field, value in run["model"].items() if "parallel" not in field}
        pretrain(tiny(**{**run, "model": alone}), run_dir=tmp_path / "alone")
        found = losses(folder / name)
        assert found[2] < found[1] < found[0] < 5.7, (name, found)
        assert found == pytest.approx(losses(tmp_path / "alone"), rel=tolerance), name


def test_a_run_with_experts_on_two_ranks_goes_on_where_it_was_saved(tmp_path):
    kind = {**ROUTED, "expert_model_parallel_size": 2}
    schedule = {"lr_decay_iters": 5, "eval_iters": 0}
    first, whole = ({"model": kind, "train": {**schedule, "train_iters": steps}} for steps in (3, 5))
    runs = {"first": {**first, "save": "saved"}, "more": {**whole, "load": "saved"}, "whole": whole}
    folder = in_two_processes(runs, tmp_path)
    assert losses(folder / "more") == losses(folder / "whole")[3:]
    assert json.loads((folder / "first" / "summary.json").read_text())["parameters"] == 213_824
