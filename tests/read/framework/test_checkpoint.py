"""The `config.json` of a checkpoint as the source of a model's sizes, where it is at hand.

`megatron_bridge_0_7_0.json` holds, for each family, the keys of a config of transformers 5.23 and the values that
Megatron Bridge 067f987d (0.7.0) gave its provider of them, with Megatron Core 0.20.
"""

import json
from pathlib import Path

import pytest

from bridge.cli.main import main
from bridge.errors import RunConfigError
from bridge.front.loader import load_run
from bridge.preflight.run import Run
from bridge.preflight.run_choice import RunChoice
from bridge.read.framework.hf_config import MBRIDGE, MCORE_BRIDGE, MEGATRON_BRIDGE, build_bridged_model
from bridge.target.fields import OWNER_DEFAULTS

MADE = json.loads(Path(__file__).with_name("megatron_bridge_0_7_0.json").read_text(encoding="utf-8"))
QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 32001,
    "torch_dtype": "bfloat16",
}
SWIFT = "#!/bin/bash\nmegatron sft --model org/a-model --dataset d --micro_batch_size 1 --max_length 2048\n"
VERL = (
    "#!/bin/bash\npython3 -m verl.trainer.main_ppo model_engine=megatron"
    " actor_rollout_ref.model.path=${HOME}/org/a-model actor_rollout_ref.actor.use_dynamic_bsz=True"
    " actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096\n"
)


def write(folder: Path, **keys: object) -> Path:
    """Write a checkpoint's `config.json`; return its folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**QWEN3, **keys}))
    return folder


def read(script: Path, text: str, checkpoint: Path | None = None) -> Run:
    script.write_text(text)
    choice = RunChoice(checkpoint=str(checkpoint)) if checkpoint is not None else None
    return load_run(config_file=script, strict=False, choice=choice)


def without_effect(provider: dict[str, object]) -> set[str]:
    """Return the fields of a provider that no layer of it reads."""
    found: set[str] = set()
    if provider.get("multi_latent_attention"):
        found |= {"kv_channels", "num_query_groups"}
    if not provider.get("num_moe_experts"):
        found |= {"moe_layer_freq", "moe_router_topk"}
    return found


@pytest.mark.parametrize("family", MADE)
def test_a_family_has_the_values_that_megatron_bridge_gives_it(family: str) -> None:
    config, provider = MADE[family]["config"], MADE[family]["provider"]
    made = build_bridged_model(config, MEGATRON_BRIDGE)
    width = int(made.fields["hidden_size"]) // int(made.fields["num_attention_heads"])
    derived = {"kv_channels": width}
    for name in sorted(set(provider) - without_effect(provider)):
        value, default = provider[name], OWNER_DEFAULTS["model"].get(name) or derived.get(name)
        read = made.fields.get(name, default)
        assert read == value or (not read and not value), f"{name}: {read} and not {value}"
    assert made.vocab_divisor == MADE[family]["divisor"]
    assert ("text_config" in str(made.other_parts)) == ("text_config" in str(config))


@pytest.mark.parametrize("bridge", [MEGATRON_BRIDGE, MBRIDGE, MCORE_BRIDGE])
def test_queries_have_no_latent_where_config_json_has_null(bridge: str) -> None:
    config = {**MADE["deepseek_v3"]["config"], "q_lora_rank": None}
    fields = build_bridged_model(config, bridge).fields
    assert fields["q_lora_rank"] is None
    assert fields["kv_lora_rank"] == 512


def test_the_bridges_differ_where_their_code_does() -> None:
    predicts = MADE["deepseek_v3"]["config"]
    assert build_bridged_model(predicts, MEGATRON_BRIDGE).fields["mtp_num_layers"] == 1
    assert "mtp_num_layers" not in build_bridged_model(predicts, MCORE_BRIDGE).fields
    assert build_bridged_model(MADE["nemotron_h"]["config"], MEGATRON_BRIDGE).fields["first_last_layers_bf16"] is True
    assert "first_last_layers_bf16" not in build_bridged_model(MADE["nemotron_h"]["config"], MCORE_BRIDGE).fields
    experts = {**QWEN3, "model_type": "qwen2_moe", "num_experts": 60, "shared_expert_intermediate_size": 5632}
    assert build_bridged_model(experts, MCORE_BRIDGE).fields["moe_shared_expert_gate"] is True
    assert "moe_shared_expert_gate" not in build_bridged_model(experts, MBRIDGE).fields
    assert (
        build_bridged_model(experts, MEGATRON_BRIDGE).unread
        == "Megatron Bridge makes no model of its model_type qwen2_moe"
    )
    assert build_bridged_model(MADE["qwen3_moe"]["config"], MEGATRON_BRIDGE).fields["bias_activation_fusion"] is False
    assert build_bridged_model(MADE["qwen3_moe"]["config"], MBRIDGE).fields["bias_activation_fusion"] is True
    assert (
        build_bridged_model(MADE["gpt_oss"]["config"], MBRIDGE).unread
        == "mbridge makes no model of its model_type gpt_oss"
    )


ERNIE = {
    "model_type": "ernie4_5_moe",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_intermediate_size": 256,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
}
LLAMA4 = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 256,
    "intermediate_size_mlp": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 1024,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
}


@pytest.mark.parametrize(("bridge", "has_bias"), [(MEGATRON_BRIDGE, True), (MCORE_BRIDGE, None)])
def test_ernie_has_dense_layers_first_and_a_bias_of_experts_in_megatron_bridge(bridge: str, has_bias) -> None:
    fields = build_bridged_model(ERNIE, bridge).fields
    assert fields["moe_layer_freq"] == [0, 1, 1, 1]
    assert (fields["num_moe_experts"], fields["moe_router_topk"]) == (8, 2)
    assert fields["moe_shared_expert_intermediate_size"] == 512
    assert fields["share_embeddings_and_output_weights"] is True
    assert fields.get("moe_router_enable_expert_bias") is has_bias


def test_llama4_has_experts_in_the_last_layer_of_each_step() -> None:
    config = {"model_type": "llama4", "text_config": LLAMA4}
    made = build_bridged_model(config, MCORE_BRIDGE)
    assert made.fields["moe_layer_freq"] == [0, 1, 0, 1]
    widths = ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
    assert [made.fields[name] for name in widths] == [1024, 256, 256]
    assert "norms without weights of queries and keys" in made.other_parts
    every = {**config, "text_config": {**LLAMA4, "interleave_moe_layer_step": 1}}
    assert "moe_layer_freq" not in build_bridged_model(every, MCORE_BRIDGE).fields
    assert (
        build_bridged_model(config, MEGATRON_BRIDGE).unread == "Megatron Bridge makes no model of its model_type llama4"
    )


def test_a_family_that_is_not_known_has_no_sizes() -> None:
    made = build_bridged_model({**QWEN3, "model_type": "new_one"}, MEGATRON_BRIDGE)
    assert (made.fields, made.dtype) == ({}, "bfloat16")
    assert made.unread == "its model_type new_one is none whose layers are known here"
    hybrid = {**QWEN3, "model_type": "nemotron_h"}
    assert build_bridged_model(hybrid, MEGATRON_BRIDGE).unread == "it states no hybrid_override_pattern"
    unplanned = build_bridged_model({**QWEN3, "model_type": "mimo_v2_flash"}, MEGATRON_BRIDGE)
    layers = "layers with other numbers of key-value heads than the rest"
    assert unplanned.unread == f"a model of its model_type mimo_v2_flash has {layers}, which are not planned"


def test_lists_of_layers_stand_for_the_patterns_that_they_replace() -> None:
    saved = MADE["nemotron_h"]["config"]
    assert "hybrid_override_pattern" not in saved
    older = {**saved, "hybrid_override_pattern": "ME*-", "mtp_hybrid_override_pattern": "*E", "num_hidden_layers": 4}
    assert build_bridged_model(older, MEGATRON_BRIDGE).fields == build_bridged_model(saved, MEGATRON_BRIDGE).fields
    without = {**older, "num_nextn_predict_layers": 0}
    assert "mtp_hybrid_override_pattern" not in build_bridged_model(without, MEGATRON_BRIDGE).fields
    compressed = MADE["deepseek_v4"]["config"]
    listed = {**compressed, "compress_ratios": MADE["deepseek_v4"]["provider"]["csa_compress_ratios"]}
    assert (
        build_bridged_model(listed, MEGATRON_BRIDGE).fields == build_bridged_model(compressed, MEGATRON_BRIDGE).fields
    )


def test_the_language_model_inside_another_one_has_a_family_of_its_own() -> None:
    outer = {"model_type": "internvl", "tie_word_embeddings": True, "vision_config": {}}
    made = build_bridged_model({**outer, "text_config": {**QWEN3, "tie_word_embeddings": False}}, MCORE_BRIDGE)
    assert made.fields == build_bridged_model({**QWEN3, "tie_word_embeddings": False}, MCORE_BRIDGE).fields
    assert "text_config: the other parts of the model" in str(made.other_parts)
    unknown = {**outer, "text_config": {**QWEN3, "model_type": "new_one"}}
    assert "is none whose layers are known here" in str(build_bridged_model(unknown, MCORE_BRIDGE).unread)
    assert build_bridged_model({**outer, "text_config": QWEN3}, MEGATRON_BRIDGE).unread is not None


def test_a_stated_checkpoint_has_the_sizes_and_the_mode(tmp_path) -> None:
    run = read(tmp_path / "run.sh", SWIFT, write(tmp_path / "here"))
    assert run.plan.shape.kinds == ("transformer",) * 4
    assert run.plan.shape.padded_vocab_size() == 32001
    assert run.origin_of("model.num_layers") == "config.json of org/a-model"
    assert run.model["bf16"] is True
    assert run.reading.uncertainty.mode_decider is None
    assert any(
        "The mode is bf16, since config.json of org/a-model has torch_dtype=bfloat16" in line
        for line in run.reading.uncertainty.open_points
    )


@pytest.mark.parametrize(
    ("words", "bridge"),
    [("", "Megatron Bridge"), (" actor_rollout_ref.actor.megatron.vanilla_mbridge=True", "mbridge")],
)
def test_a_value_that_no_config_json_has_comes_from_the_bridge(tmp_path, words: str, bridge: str) -> None:
    run = read(tmp_path / "run.sh", f"{VERL.rstrip()}{words}\n", write(tmp_path / "here"))
    assert run.origin_of("model.attention_softmax_in_fp32") == bridge
    assert run.origin_of("model.normalization") == bridge
    assert run.origin_of("model.hidden_size") == "config.json of ${HOME}/org/a-model"


@pytest.mark.parametrize("bridge", ["", " actor_rollout_ref.actor.megatron.vanilla_mbridge=True"])
def test_verl_sets_some_fields_over_those_of_either_bridge(tmp_path, bridge: str) -> None:
    folder = write(tmp_path / "here", model_type="qwen3_moe", num_experts=8, moe_intermediate_size=64)
    run = read(tmp_path / "run.sh", f"{VERL.rstrip()}{bridge}\n", folder)
    assert (run.model["attention_backend"], run.model["moe_token_dispatcher_type"]) == ("flash", "alltoall")
    assert run.origin_of("model.attention_backend") == "verl at start"
    assert run.model.get("bias_activation_fusion") is bool(bridge)
    assert run.reading.uncertainty.unread_options == ()


@pytest.mark.parametrize("text", [SWIFT, VERL], ids=["ms-swift", "verl"])
def test_memory_rests_on_no_value_that_is_open(tmp_path, capsys, text: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text)
    folder = write(tmp_path / "here")
    assert main(["memory", str(script), "--target", "h100x1", "--json", "--context", f"checkpoint={folder}"]) == 0
    assert json.loads(capsys.readouterr().out)["rests_on_unknown"] == {}


def test_a_checkpoint_of_fp32_trains_in_fp16_and_that_is_reported(tmp_path) -> None:
    run = read(tmp_path / "run.sh", SWIFT, write(tmp_path / "here", torch_dtype="float32"))
    assert run.model["fp16"] is True
    assert any("ms-swift trains in fp16 with it" in line for line in run.reading.uncertainty.open_points)


@pytest.mark.parametrize("place", ["org/a-model", "hub/models--org--a-model/snapshots/5c1"])
def test_a_checkpoint_is_found_next_to_the_script_and_among_downloads(tmp_path, monkeypatch, place: str) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    write(tmp_path / place)
    run = read(tmp_path / "run.sh", SWIFT)
    assert run.model["num_layers"] == 4
    assert any(str(tmp_path / place / "config.json") in line for line in run.reading.notes)


def test_a_size_that_the_script_states_stays(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "org/a-model")
    stated = " +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers=2"
    run = read(tmp_path / "run.sh", f"{VERL.rstrip()}{stated}\n")
    assert (run.model["num_layers"], run.model["hidden_size"]) == (2, 512)
    assert run.origin_of("model.num_layers") == "run.sh"


def test_a_vision_tower_leaves_memory_without_a_verdict(tmp_path) -> None:
    folder = write(tmp_path / "here", model_type="qwen3_vl", text_config=QWEN3)
    run = read(tmp_path / "run.sh", VERL, folder)
    assert run.plan.shape.num_layers == 4
    assert run.reading.uncertainty.unread_options
    assert any(
        "such as a vision tower, are neither planned nor counted" in line
        for line in run.reading.uncertainty.open_points
    )


def test_without_the_file_the_answer_says_which_one_decides(tmp_path, capsys) -> None:
    script = tmp_path / "run.sh"
    script.write_text(VERL)
    assert main(["plan", str(script)]) == 2
    printed = capsys.readouterr().err
    assert "which config.json of ${HOME}/org/a-model decides. Add --context checkpoint=FOLDER" in printed
    folder = write(tmp_path / "here")
    assert main(["plan", str(script), "--context", f"checkpoint={folder}"]) == 0


def test_a_checkpoint_is_refused_where_it_makes_no_model(tmp_path) -> None:
    with pytest.raises(RunConfigError, match=r"must be a folder with a config\.json"):
        read(tmp_path / "run.sh", SWIFT, tmp_path / "gone")
    folder = write(tmp_path / "here")
    with pytest.raises(RunConfigError, match="is the checkpoint that makes a model"):
        read(tmp_path / "lm.sh", "#!/bin/bash\ntorchrun pretrain_gpt.py --bf16 --num-layers 2\n", folder)


@pytest.mark.parametrize("bridge", [MEGATRON_BRIDGE, MBRIDGE, MCORE_BRIDGE])
def test_a_language_model_without_a_block_of_its_own_stands_at_the_top(bridge: str) -> None:
    sizes = {"num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, "tie_word_embeddings": False}
    flat = build_bridged_model({"model_type": "qwen2_5_vl", **sizes, "vision_config": {"depth": 32}}, bridge)
    nested = build_bridged_model({"model_type": "qwen2_5_vl", "text_config": sizes}, bridge)
    assert flat.fields == nested.fields
    assert flat.fields["num_layers"] == 28
    assert flat.other_parts is not None
    assert flat.other_parts.startswith("model_type qwen2_5_vl: the other parts of the model, such as a vision tower")


def test_a_file_without_a_language_model_gives_no_sizes() -> None:
    model = build_bridged_model({"model_type": "qwen2_5_vl", "vision_config": {"depth": 32}}, MEGATRON_BRIDGE)
    assert (model.fields, model.unread) == ({}, "it states no text_config")
