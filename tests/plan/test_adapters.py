"""Fine-tuning with an adapter of Megatron Bridge: what is frozen, what is trained, and what that takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from bridge.errors import RunConfigError
from bridge.front.loader import load_run
from bridge.plan.planned_run import PlannedRun

HIDDEN, FFN, LAYERS, QKV = 64, 128, 2, 64 + 2 * 32
"""Of the model: four heads of 16, two of them of keys and values."""
MODEL = {
    "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": FFN,
    "vocab_size": 256,
    "seq_length": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "add_bias_linear": False,
    "bf16": True,
}
PEFT = "megatron.bridge.peft"


def planned(tmp_path: Path, peft: dict[str, Any] | None, **sizes: int) -> PlannedRun:
    precision = {"_target_": "megatron.bridge.training.mixed_precision.MixedPrecisionConfig", "bf16": True}
    content = {
        "_target_": "megatron.bridge.training.config.ConfigContainer",
        "model": {**MODEL, **sizes},
        "mixed_precision": {**precision, "params_dtype": {"_target_": "torch.bfloat16", "_call_": False}},
        "train": {"micro_batch_size": 1, "global_batch_size": 1},
        **({} if peft is None else {"peft": peft}),
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return PlannedRun(prediction=load_run((), config_file=path).prediction)


@pytest.mark.parametrize(
    ("peft", "own"),
    [
        ({"_target_": f"{PEFT}.lora.LoRA", "dim": 8, "target_modules": ["linear_qkv"]}, HIDDEN * 8 + 8 * QKV),
        (
            {"_target_": f"{PEFT}.lora.LoRA", "dim": 8, "target_modules": ["linear_proj", "linear_fc2"]},
            (HIDDEN * 8 + 8 * HIDDEN) + (FFN * 8 + 8 * HIDDEN),
        ),
        (
            {"_target_": f"{PEFT}.canonical_lora.CanonicalLoRA", "dim": 8, "target_modules": ["linear_q", "linear_v"]},
            (HIDDEN * 8 + 8 * 64) + (HIDDEN * 8 + 8 * 32),
        ),
        ({"_target_": f"{PEFT}.dora.DoRA", "dim": 8, "target_modules": ["linear_qkv"]}, HIDDEN * 8 + 8 * QKV + QKV),
    ],
    ids=["one layer", "two layers", "parts of a layer", "with magnitudes"],
)
def test_weights_are_frozen_and_the_adapters_own_have_gradients_masters_and_states(
    tmp_path: Path, peft: dict[str, Any], own: int
) -> None:
    whole, tuned = planned(tmp_path, None).memory, planned(tmp_path, peft).memory
    trained = LAYERS * own
    (rank,) = tuned.ranks
    assert tuned.parameters == whole.parameters + trained
    assert rank.bytes_of["weights"] == 2 * tuned.parameters
    assert rank.bytes_of["master weights"] == 4 * trained
    assert rank.bytes_of["optimizer state"] == 8 * trained
    assert rank.bytes_of["gradients"] < whole.ranks[0].bytes_of["gradients"] // 4
    assert rank.bytes_of["activations"] < whole.ranks[0].bytes_of["activations"]


@pytest.mark.parametrize("is_grouped", [True, False])
def test_without_targets_the_output_layer_has_an_adapter_and_grouped_experts_and_routers_have_none(
    tmp_path: Path, is_grouped: bool
) -> None:
    peft = {"_target_": f"{PEFT}.lora.LoRA", "dim": 8, "target_modules": [], "exclude_modules": ["linear_proj"]}
    run = planned(tmp_path, peft, num_moe_experts=2, moe_grouped_gemm=is_grouped)
    names = {row["module"] for row in run.plan.rows()}
    adapters = {name.partition(".adapter")[0] for name in names if ".adapter" in name}
    experts = set() if is_grouped else {"experts.linear_fc1", "experts.linear_fc2"}
    assert adapters == {"linear_qkv", "output_layer"} | experts


@pytest.mark.parametrize(
    ("target", "on_a_rank"),
    [("linear_qkv", HIDDEN * 8 + 8 * QKV // 2), ("linear_proj", HIDDEN // 2 * 8 + 8 * HIDDEN)],
    ids=["column", "row"],
)
def test_one_of_the_two_layers_of_transformer_engines_adapter_is_whole_on_each_rank(
    tmp_path: Path, target: str, on_a_rank: int
) -> None:
    peft = {"type": "LoraParallelLinear", "dim": 8, "target_modules": [target]}
    whole = planned(tmp_path, None, tensor_model_parallel_size=2).memory
    tuned = planned(tmp_path, peft, tensor_model_parallel_size=2).memory
    trained = LAYERS * on_a_rank
    assert tuned.ranks[0].bytes_of["weights"] - whole.ranks[0].bytes_of["weights"] == 2 * trained
    assert tuned.ranks[0].bytes_of["master weights"] == 4 * trained


def test_an_adapter_that_the_plan_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RunConfigError, match=r"peft\.type: cannot plan: the plan knows the adapters LoRA, .*'Rotary'"):
        _ = planned(tmp_path, {"_target_": f"{PEFT}.rotary.Rotary"}).memory
