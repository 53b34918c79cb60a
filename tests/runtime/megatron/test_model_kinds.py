"""Kinds of models in every scheme: the modules and the GEMMs of a run are those of its plan."""

import pytest

from bridge.plan.precision_plan import PrecisionPlan, precision_plan
from bridge.runtime.audit.plan_comparison import compare_with_plan
from bridge.runtime.audit.record import Record
from bridge.target.versions import get_installed_version
from bridge.training.loop import RunSummary, pretrain
from tests.training.grid import slow
from tests.training.loop_tiny import tiny

SCHEMES = (None, "delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")
EXPERTS = {"num_moe_experts": 4, "moe_shared_expert_intermediate_size": 64, "moe_aux_loss_coeff": 0.01}
LATENT = {"multi_latent_attention": True, "qk_head_dim": 16, "qk_pos_emb_head_dim": 16, "v_head_dim": 32}
KINDS = {
    "dense with biases": {"add_bias_linear": True, "normalization": "LayerNorm"},
    "gated, grouped queries, norms": {"gated_linear_unit": True, "num_query_groups": 2, "qk_layernorm": True},
    "experts": EXPERTS,
    "grouped experts in every second layer": {
        "num_moe_experts": 4,
        "moe_grouped_gemm": True,
        "moe_ffn_hidden_size": 64,
        "moe_layer_freq": [0, 1],
        "moe_token_dispatcher_type": "alltoall",
        "gated_linear_unit": True,
    },
    "latent attention": {**LATENT, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_layernorm": True},
    "latent attention without a latent of queries": {**LATENT, "q_lora_rank": None, "kv_lora_rank": 32},
    "prediction layers": {"mtp_num_layers": 2},
    "experts, latent attention and a prediction layer": {
        **EXPERTS,
        **LATENT,
        "moe_layer_freq": [0, 1],
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "mtp_num_layers": 1,
    },
}
CASES = [case if index in (2, 4, 7) else slow(case) for index, case in enumerate(KINDS)]
ONE_STEP = {"train_iters": 1, "eval_iters": 0}


def run_of(tmp_path, kind: dict, scheme: str | None, **more) -> tuple[RunSummary, PrecisionPlan]:
    config = tiny(low=scheme, model=kind, train=ONE_STEP, **more)
    config.logging.quantisation_interval = 0
    summary = pretrain(config, run_dir=tmp_path / str(scheme))
    config.model.vocab_size = 256
    return summary, precision_plan(
        None, config.model, optimizer=config.optimizer, ddp=config.ddp, mcore=get_installed_version("mcore")
    )


def parameters(plan: PrecisionPlan) -> int:
    """Return the parameters of the modules that a plan names."""
    return sum(planned.module.parameters for layer in plan.layers for planned in layer.modules)


def mismatches(summary: RunSummary, plan: PrecisionPlan) -> list[str]:
    """Return where the GEMMs that ran are not those of the plan."""
    return [str(one) for one in compare_with_plan(plan, Record(gemms=summary.gemms))]


@pytest.mark.parametrize("kind", CASES)
def test_a_run_has_the_modules_and_the_formats_of_its_plan(kind, tmp_path):
    for scheme in SCHEMES:
        summary, plan = run_of(tmp_path, KINDS[kind], scheme)
        assert mismatches(summary, plan) == [], scheme
        assert summary.parameters == parameters(plan), scheme


@pytest.mark.parametrize("kind", [case if index in (2, 4) else slow(case) for index, case in enumerate(KINDS)])
def test_weights_are_stored_in_the_format_of_the_plan(kind, tmp_path):
    for scheme in ("delayed", "tensorwise", "mxfp8"):
        summary, plan = run_of(tmp_path, KINDS[kind], scheme, stored=True, sharded=True)
        stored = sum(row.bytes for row in summary.census if row.kind == "parameters" and row.dtype.startswith("e4m3"))
        elements = sum(
            module.inputs * module.outputs * module.count
            for layer in plan.layers
            for module in (planned.module for planned in layer.modules)
            if module.kind == "linear"
        )
        assert stored >= elements, scheme
        assert mismatches(summary, plan) == [], scheme


def test_first_and_last_layers_in_bf16_leave_a_prediction_layer_in_fp8(tmp_path):
    kind = {"mtp_num_layers": 1, "num_layers": 3, "first_last_layers_bf16": True}
    summary, plan = run_of(tmp_path, kind, "tensorwise")
    assert mismatches(summary, plan) == []
    assert {record.layer for record in summary.gemms if record.scheme == "none"} == {"1", "3", "output"}
    assert {record.layer for record in summary.gemms if record.scheme == "tensorwise"} == {"2", "mtp 1"}
