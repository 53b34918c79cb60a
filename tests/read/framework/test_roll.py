"""ROLL's files: the actor that trains on Megatron Core, and what ROLL sets, drops and leaves open."""

import json
from pathlib import Path

import pytest

from bridge.errors import UnreadFileError
from bridge.front.loader import load_run
from bridge.preflight.rule_check import check
from bridge.preflight.run_choice import RunChoice

FILE = """\
defaults:
- envs@_here_
pretrain: org/a-model
sequence_length: 4096
actor_train:
  model_args: {dtype: MODE}
  training_args: {per_device_train_batch_size: 2}
  strategy_args:
    strategy_name: megatron_train
    strategy_config:
      tensor_model_parallel_size: 2
      expert_model_parallel_size: 2
      use_distributed_optimizer: true
      recompute_granularity: full
      MORE: null
  device_mapping: list(range(0,16))
"""
SCRIPT = "CONFIG_PATH=$(basename $(dirname $0))\npython examples/start_rlvr_pipeline.py --config_path $CONFIG_PATH \\\n"


def file(mode: str = "bf16", more: str = "MORE: null") -> str:
    return FILE.replace("MODE", mode).replace("MORE: null", more)


def test_settings_of_the_strategy_reach_the_configs_of_megatron(run_of) -> None:
    run = run_of(file(), "run.yaml")
    model = run.model
    assert (
        model["tensor_model_parallel_size"],
        model["seq_length"],
        run.section("train")["micro_batch_size"],
    ) == (
        *(2, 4096),
        2,
    )
    assert run.section("ddp")["use_distributed_optimizer"] is True
    assert run.find_decider("model.num_layers") == "config.json of org/a-model"
    assert (
        "defaults: envs@_here_ may state settings of the actor, and is not read." in run.reading.uncertainty.open_points
    )
    assert any("has 16 of them. Add --target h100x16" in sentence for sentence in run.reading.uncertainty.open_points)


def test_values_set_at_start_have_roll_as_their_origin(run_of) -> None:
    run = run_of(file(), "run.yaml")
    wanted = {
        "model.bf16": True,
        "model.params_dtype": "bf16",
        "model.sequence_parallel": True,
        "model.recompute_method": "uniform",
        "ddp.grad_reduce_in_fp32": True,
    }
    for path, value in wanted.items():
        section, _, name = path.partition(".")
        assert run.section(section)[name] == value, path
    assert run.origin_of("ddp.grad_reduce_in_fp32") == "ROLL at start"


@pytest.mark.parametrize(
    ("mode", "more", "switches"),
    [
        ("fp16", "MORE: null", (False, True)),
        ("fp32", "MORE: null", (False, False)),
        ("fp32", "bf16: true", (True, False)),
        ("null", "MORE: null", (True, False)),
    ],
)
def test_the_mode_is_the_dtype_unless_the_strategy_states_it(run_of, mode: str, more: str, switches) -> None:
    run = run_of(file(mode, more), "run.yaml")
    assert (run.model.get("bf16"), run.model.get("fp16")) == switches


def test_a_setting_of_the_optimizer_that_its_strategy_does_not_hand_on_is_warned_of(run_of) -> None:
    found = check(run_of(file(more="optimizer_cpu_offload: true"), "run.yaml")).findings
    (dropped,) = [one for one in found if "ROLL does not forward it" in one.rule]
    assert dropped.path == "optimizer.optimizer_cpu_offload"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            file().replace("megatron_train", "fsdp2_train"),
            "strategy_name=fsdp2_train, which trains without Megatron Core",
        ),
        (
            file().replace("actor_train", "reward"),
            "does not state actor_train.strategy_args.strategy_name, and describes no training",
        ),
    ],
)
def test_a_file_of_another_trainer_is_named_by_its_script_too(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    (tmp_path / "run.sh").write_text(f"{SCRIPT}  --config_name run\n")
    with pytest.raises(UnreadFileError, match=sentence):
        load_run(config_file=tmp_path / "run.sh")


def test_a_script_is_read_with_the_file_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(file())
    (tmp_path / "run.sh").write_text(f"{SCRIPT}  --config_name run\n")
    run = load_run(config_file=tmp_path / "run.sh", strict=False)
    assert run.model["tensor_model_parallel_size"] == 2
    (tmp_path / "run.yaml").unlink()
    with pytest.raises(UnreadFileError, match="which is not found from here"):
        load_run(config_file=tmp_path / "run.sh")


CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
}


@pytest.mark.parametrize(
    ("experts", "more", "router", "is_grouped"),
    [(32, "MORE: null", "fp32", None), (16, "moe_grouped_gemm: true", None, True)],
)
def test_the_checkpoint_makes_the_model_and_the_arguments_its_experts(
    tmp_path: Path, experts: int, more: str, router: str | None, is_grouped: bool | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_experts": experts}), encoding="utf-8")
    (tmp_path / "run.yaml").write_text(file(more=more))
    run = load_run(config_file=tmp_path / "run.yaml", choice=RunChoice(checkpoint=str(tmp_path)))
    model = run.model
    assert (model["num_layers"], model["num_moe_experts"], model["qk_layernorm"]) == (2, experts, True)
    assert (model.get("moe_router_dtype"), model.get("moe_grouped_gemm")) == (router, is_grouped)
    assert "moe_token_dispatcher_type" not in model
    assert run.plan is not None


def test_a_family_whose_layers_are_not_known_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "glm4_moe"}), encoding="utf-8")
    (tmp_path / "run.yaml").write_text(file())
    run = load_run(config_file=tmp_path / "run.yaml", choice=RunChoice(checkpoint=str(tmp_path)), strict=False)
    sentence = "its model_type glm4_moe is none whose layers are known here"
    assert any(sentence in line for line in run.reading.lines)


def test_a_balanced_pack_of_samples_is_a_micro_batch(run_of) -> None:
    arguments = "{algorithm: NAME, max_packed_sequence_length_train: 9000}"
    packing = f"use_sequence_packing: true\n  sequence_packing_args: {arguments}"
    text = file().replace("device_mapping:", f"{packing}\n  device_mapping:")
    run = run_of(text.replace("NAME", "load_balance"), "run.yaml")
    assert (run.model["seq_length"], run.section("train")["micro_batch_size"]) == (9000, 1)
    run = run_of(text.replace("NAME", "none"), "run.yaml")
    assert (run.model["seq_length"], run.section("train")["micro_batch_size"]) == (4096, 2)


def test_the_release_is_that_of_its_newest_image(run_of) -> None:
    release = run_of(file(), "run.yaml").reading.release
    assert (str(release.version), "Dockerfile" in release.reason) == ("0.16.1", True)


@pytest.mark.parametrize("trainer", ["sft_train", "student", "student_train"])
def test_each_worker_that_trains_is_read_like_the_actor(run_of, trainer: str) -> None:
    run = run_of(file().replace("actor_train", trainer), "run.yaml")
    assert run.model["tensor_model_parallel_size"] == 2
    assert run.section("ddp")["grad_reduce_in_fp32"] is True
    points = run.reading.uncertainty.open_points
    assert f"The number of GPUs: {trainer}.device_mapping has 16 of them. Add --target h100x16, for example." in points
    key = f"{trainer}.strategy_args.strategy_config.tensor_model_parallel_size"
    assert run.reading.translate_key(key) == "model.tensor_model_parallel_size"


def test_a_worker_that_trains_on_something_else_is_named_by_its_key(run_of) -> None:
    text = file().replace("actor_train", "sft_train").replace("megatron_train", "deepspeed_train")
    with pytest.raises(UnreadFileError, match=r"sft_train\.strategy_args"):
        run_of(text, "run.yaml")


def test_dpo_trains_on_pairs_of_samples(run_of) -> None:
    assert run_of(file() + "chosen_key: chosen\n", "run.yaml").section("train")["micro_batch_size"] == 4


def test_a_sequence_is_a_prompt_and_a_response_where_its_length_is_not_stated(run_of) -> None:
    lengths = "response_length: 3072\nprompt_length: 2048"
    assert run_of(file().replace("sequence_length: 4096", lengths), "run.yaml").model["seq_length"] == 5120
    assert (
        run_of(file().replace("sequence_length: 4096", "response_length: 3072"), "run.yaml").model["seq_length"] == 4096
    )


@pytest.mark.parametrize(
    ("more", "is_named"),
    [
        ("", True),
        ("init_kl_coef: 0.0", False),
        ("init_kl_coef: 0.0\nuse_kl_loss: true", True),
        ("init_kl_coef: 0\nenable_reference: true", True),
        ("init_kl_coef: 0.0\nchosen_key: chosen", True),
    ],
)
def test_a_reference_model_is_named_where_the_run_starts_one(run_of, more: str, is_named: bool) -> None:
    run = run_of(f"{file()}reference: {{strategy_args: {{strategy_name: megatron_infer}}}}\n{more}\n", "run.yaml")
    sentence = "reference.strategy_args.strategy_name=megatron_infer: the weights of a reference model are not counted."
    assert (sentence in run.reading.lines) is is_named


def test_the_frozen_model_is_the_reference_of_adapters(run_of) -> None:
    text = file().replace("dtype: bf16", "dtype: bf16, lora_target: all-linear")
    run = run_of(f"{text}reference: {{strategy_args: {{strategy_name: megatron_infer}}}}\n", "run.yaml")
    assert not [line for line in run.reading.lines if line.startswith("reference.")]


@pytest.mark.parametrize(("estimator", "is_named"), [("gae", True), ("grpo", False)])
def test_a_critic_is_named_where_the_estimator_needs_one(run_of, estimator: str, is_named: bool) -> None:
    critic = "critic: {strategy_args: {strategy_name: megatron_train}}"
    run = run_of(f"{file()}{critic}\nadv_estimator: {estimator}\n", "run.yaml")
    assert bool([line for line in run.reading.lines if line.startswith("critic.")]) is is_named


def test_the_old_switch_of_recomputed_experts_is_what_megatron_core_makes_of_it(run_of) -> None:
    text = file(more="moe_layer_recompute: true").replace("recompute_granularity: full", "moe_grouped_gemm: true")
    run = run_of(text, "run.yaml")
    assert (run.model["recompute_granularity"], run.model["recompute_modules"]) == ("selective", ["core_attn", "moe"])
    assert run.origin_of("model.recompute_granularity") == "Megatron Core at start"
    run = run_of(file(more="moe_layer_recompute: true"), "run.yaml")
    assert run.model["recompute_granularity"] == "full"


@pytest.mark.parametrize(
    ("devices", "count"),
    [("list(range(4, 8))", 4), ("list([0,1,2,8])", 4), ("'[6, 7]'", 2), ("list(range(0,2))+list(range(14,16))", 4)],
)
def test_the_gpus_of_the_trainer_are_counted(run_of, devices: str, count: int) -> None:
    run = run_of(file().replace("list(range(0,16))", devices), "run.yaml")
    sentence = f"The number of GPUs: actor_train.device_mapping has {count} of them. Add --target h100x{count}"
    assert f"{sentence}, for example." in run.reading.lines
