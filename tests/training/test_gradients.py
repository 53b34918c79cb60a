"""The one-batch check on real models: it separates roundings from a broken recipe, a broken layer and another batch."""

from __future__ import annotations

import itertools
import json

import pytest

from bridge import get_mixed_precision_config
from bridge.errors import RunConfigError
from bridge.report.gradient_band import describe_band
from bridge.runtime.compare.band import compute_band
from bridge.runtime.megatron.backend import Backend
from bridge.runtime.megatron.one_batch import capture_linear_results, compute_relative_errors
from bridge.runtime.megatron.process import training_process
from bridge.training.measurements import check_gradients, get_gemm_formats
from bridge.training.run import build_run
from tests import warm
from tests.training.grid import slow
from tests.training.loop_tiny import tiny

BROKEN = {"fp8_margin": 19}


def check(name: str, model: dict | None = None, **stated: object):
    """Compare BF16 with a recipe."""
    configs = [tiny(sharded=True, model=model) for _ in range(2)]
    configs[0].mixed_precision = "bf16_mixed"
    configs[1].mixed_precision = get_mixed_precision_config(name).override(**stated)
    return check_gradients(*configs), configs[1]


def test_fp8_is_inside_and_a_margin_of_19_outside_from_the_first_layer_on():
    found, config = check(
        "fp8_current",
        model={
            "num_layers": 3,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    )
    assert found.verdict == "inside"
    assert len(found.rows) == 3 * 4 * 3
    assert get_gemm_formats(config.model) == (("bf16", "e4m3"), ("bf16", "e4m3", "e5m2"))
    forward = {row.layer: row.error for row in found.rows if row.gemm == "fprop"}
    assert forward[1] == 0 < forward[2] < 0.1  # the first layer stays in BF16
    assert all(row.control > row.bound for row in found.rows if row.gemm == "fprop"), "a shuffled batch is outside"
    found, _ = check("fp8_delayed", **BROKEN)
    first = found.first_outside
    assert found.verdict == "outside"
    assert (first.layer, first.module, first.gemm) == (1, "self_attention.linear_qkv", "fprop")


EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01}
HYBRID = {
    **EXPERTS,
    "hybrid_layer_pattern": "M*E-",
    "num_layers": 4,
    "mamba_num_heads": 32,
    "mamba_head_dim": 4,
    "mamba_num_groups": 2,
    "mamba_state_dim": 24,
    "position_embedding_type": "none",
}


@pytest.mark.parametrize("model", [slow(EXPERTS), HYBRID], ids=["experts", "hybrid"])
def test_both_runs_send_their_tokens_to_the_same_experts(model):
    found, _ = check("fp8_current", model=model, first_last_layers_bf16=False)
    compared = {(row.module, row.gemm) for row in found.rows}
    experts = {f"mlp.experts.local_experts.{expert}.linear_fc{number}" for expert in range(4) for number in (1, 2)}
    assert set(itertools.product(experts, ("fprop", "dgrad", "wgrad"))) < compared
    assert found.first_outside is None
    assert 0 < found.rerouted < 0.2
    assert f"the second would send {found.rerouted:.2%} of the tokens elsewhere." in describe_band(found)


@pytest.mark.slow
def test_a_broken_recipe_of_experts_is_outside_from_the_first_layer_on():
    found, _ = check("fp8_delayed", model=EXPERTS, **BROKEN)
    assert (found.verdict, found.first_outside.layer) == ("outside", 1)


def test_experts_whose_router_takes_no_choice_are_refused():
    model = {**EXPERTS, "moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0}
    with pytest.raises(RunConfigError) as refused:
        check("fp8_current", model=model)
    assert str(refused.value) == (
        "gradients: needs routers that send each token to the experts with the highest scores, and drop none, got "
        "'sinkhorn, capacity None'. Set model.moe_router_load_balancing_type=aux_loss and "
        "model.moe_expert_capacity_factor=null."
    )


def test_two_runs_of_one_precision_have_no_error():
    found, _ = check("bf16_mixed")
    assert [row.error for row in found.rows] == [0.0] * len(found.rows)


def test_other_weights_are_refused():
    first, second = tiny(), tiny(train={"seed": 7})
    with pytest.raises(RunConfigError, match="needs the same weights in both runs"):
        check_gradients(first, second)


def test_a_layer_whose_forward_or_backward_pass_is_wrong_is_named():
    config = tiny(model={"num_layers": 3})
    with training_process(config.model, seed=1) as process:
        run = build_run(config, process, backend=Backend(name="local"))
        batch = [next(run.batches_of(run.splits.train, start=0))]
        layer = run.trainer.model[0].module.module.decoder.layers[1]
        taken = []
        for fault in (None, "forward", "backward"):
            hooks = []
            if fault == "forward":
                hooks.append(layer.mlp.linear_fc1.register_forward_hook(lambda _, __, out: (1.2 * out[0], out[1])))
            if fault == "backward":
                norm = layer.pre_mlp_layernorm
                hooks.append(
                    norm.register_forward_hook(lambda _, __, out: out.register_hook(lambda grad: 2 * grad) and None)
                )
            with capture_linear_results(run.trainer.model) as results:
                run.trainer.forward_backward(iter(batch * run.trainer.num_microbatches))
            for hook in hooks:
                hook.remove()
            taken.append(results)
    sound, *broken = taken
    firsts = []
    for results in broken:
        errors = compute_relative_errors(sound, results)
        firsts.append(compute_band(errors, errors, num_layers=3, forward=2**-7, backward=2**-7).first_outside)
    assert [(one.layer, one.module, one.gemm) for one in firsts] == [
        (2, "mlp.linear_fc1", "fprop"),
        (2, "mlp.linear_fc1", "dgrad"),
    ]


def test_the_command_names_both_recipes_and_ends_with_the_verdicts_code(tmp_path):
    words = [
        "precision-bridge",
        "compare",
        "--gradients",
        "bf16_mixed",
        "fp8_delayed fp8_margin=19",
        "model=gpt_tiny",
        "--json",
    ]
    done = warm.run([*words, "model.num_layers=1", "train=smoke"], cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["recipes"] == ["bf16_mixed", "bf16_with_fp8_delayed_scaling_mixed, fp8_margin=19"]
    assert (found["verdict"], found["first_outside"]["layer"]) == ("outside", 1)
    assert found["control_outside"] > 4
    alone = warm.run(["precision-bridge", "compare", "--gradients", "bf16_mixed"], cwd=tmp_path)
    assert (alone.returncode, alone.stdout) == (2, "")
    assert alone.stderr.startswith("--gradients: compares two recipes, got ['bf16_mixed']. Write precision-bridge")


@pytest.mark.slow
def test_the_default_model_separates_three_cases(tmp_path):
    for second, code in (("fp8_current", 0), ("fp8_delayed fp8_margin=19", 1)):
        done = warm.run(["precision-bridge", "compare", "--gradients", "bf16_mixed", second, "--json"], cwd=tmp_path)
        assert done.returncode == code, done.stderr
        found = json.loads(done.stdout)
        assert found["control_outside"] >= len(found["rows"]) / 2
        first = found["first_outside"]
        assert first is None if code == 0 else (first["layer"], first["gemm"]) == (1, "fprop")
