"""ms-swift's command lines: Megatron's names as true and false, and a mode that the checkpoint decides."""

import json

import pytest

from bridge.cli.main import main
from bridge.errors import RunConfigError
from bridge.front.loader import load_run
from bridge.preflight.rule_check import check
from bridge.preflight.run_choice import RunChoice

COMMAND = "NPROC_PER_NODE=8 megatron sft --model org/a-model --dataset d --micro_batch_size 1 --max_length 2048"
FP8 = "--fp8_format e4m3 --fp8_recipe blockwise --fp8_param_gather true"


def test_a_mode_that_nothing_states_is_the_checkpoints(run_of, capsys, tmp_path) -> None:
    run = run_of(f"#!/bin/bash\n{COMMAND} {FP8}\n", "run.sh")
    assert run.reading.uncertainty.mode_decider == "the torch_dtype of org/a-model"
    assert "bf16" not in run.model
    assert [one for one in check(run).findings if one.severity == "error"] == []
    assert main(["plan", "--config", str(tmp_path / "run.sh")]) == 2
    assert "the mode is not stated; the torch_dtype of org/a-model decides" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ("--bf16 true", "bf16"),
        ("--fp16 true", "fp16"),
        ("--torch_dtype bfloat16", "bf16"),
        ("--torch_dtype float16", "fp16"),
        ("--torch_dtype float32", "fp16"),
        ("--torch_dtype=bfloat16", "bf16"),
    ],
)
def test_the_mode_is_stated_or_follows_from_the_dtype(run_of, words: str, mode: str) -> None:
    run = run_of(f"#!/bin/bash\n{COMMAND} {words}\n", "run.sh")
    assert [name for name in ("bf16", "fp16") if run.model.get(name)] == [mode]
    assert run.section("optimizer")[mode] is True
    assert run.reading.uncertainty.mode_decider is None


def test_names_of_fp8_reach_the_model_the_optimizer_and_ddp(run_of) -> None:
    run = run_of(f"#!/bin/bash\n{COMMAND} {FP8} --bf16 true\n", "run.sh")
    assert (run.model["fp8"], run.model["fp8_recipe"], run.model["fp8_param"]) == ("e4m3", "blockwise", True)
    assert run.section("optimizer")["fp8_recipe"] == "blockwise"
    assert run.section("ddp")["fp8_param_gather"] is True
    assert run.model["seq_length"] == 2048


def test_the_scheme_that_nothing_states_is_delayed_scaling(run_of) -> None:
    run = run_of(f"#!/bin/bash\n{COMMAND} --fp8_format hybrid --bf16 true\n", "run.sh")
    assert run.section("optimizer")["fp8_recipe"] == "delayed"
    assert run.prediction.values["model"]["fp8_recipe"] == "delayed"
    assert run.origin_of("optimizer.fp8_recipe") == "ms-swift at start"


@pytest.mark.parametrize(
    ("words", "is_fp32"),
    [
        ("--bf16 true", True),
        ("--bf16 true --accumulate_allreduce_grads_in_fp32 false", True),
        ("--bf16 true --use_precision_aware_optimizer true --main_grads_dtype bf16", False),
        ("--fp16 true", False),
    ],
)
def test_bf16_reduces_in_fp32_whatever_is_stated(run_of, words: str, is_fp32: bool) -> None:
    run = run_of(f"#!/bin/bash\n{COMMAND} {words}\n", "run.sh")
    assert bool(run.section("ddp").get("grad_reduce_in_fp32")) is is_fp32


@pytest.mark.parametrize(
    "variable",
    ["ASCEND_RT_VISIBLE_DEVICES=0,1", "HCCL_CONNECT_TIMEOUT=9", "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True"],
)
def test_a_run_on_npus_has_no_gpus_and_the_release_of_megatron_core_of_its_guide(run_of, variable: str) -> None:
    run = run_of(f"#!/bin/bash\n{variable} {COMMAND} --bf16 true\n", "run.sh")
    name = variable.partition("=")[0]
    lines = " ".join(run.reading.lines)
    assert "h100" not in lines
    assert f"{name} is set, which NPUs of Ascend alone read: MindSpeed changes Megatron Core" in lines
    assert str(run.reading.release.version) == "0.16.1"
    assert name in run.prediction.unread_options


def test_a_file_of_arguments_is_read_with_the_words_behind_it(run_of, tmp_path) -> None:
    text = (
        "ENV: {NVTE_FUSED_ATTN: '1'}\nmodel: org/a-model\ndataset: [d]\nsplit_dataset_ratio: 0.01\n"
        "micro_batch_size: 1\nbf16: true\nloss_scale: default\ntuner_type: lora\nrecompute_granularity: none\n"
    )
    run = run_of(text, "conf/sft.yaml")
    assert (run.model["bf16"], run.model.get("recompute_granularity")) == (True, None)
    assert run.reading.environment == {"NVTE_FUSED_ATTN": "1"}
    assert run.section("peft")["dim"] == 8
    assert "loss_scale" not in run.section("optimizer")
    run = run_of("#!/bin/bash\nmegatron sft conf/sft.yaml --bf16 false --fp16 true\n", "run.sh")
    assert (run.model["bf16"], run.model["fp16"]) == (False, True)
    assert run.reading.environment["NVTE_FUSED_ATTN"] == "1"


@pytest.mark.parametrize(("dtype", "count"), [("bf16", 1), ("fp32", 0)])
def test_moments_in_bf16_of_weights_stored_in_fp8_are_an_error(run_of, dtype: str, count: int) -> None:
    words = (
        "--bf16 true --fp8_format e4m3 --fp8_recipe delayed --fp8_param_gather true "
        f"--use_precision_aware_optimizer true --exp_avg_dtype {dtype} --exp_avg_sq_dtype {dtype}"
    )
    run = run_of(f"#!/bin/bash\n{COMMAND} {words}\n", "run.sh")
    assert [one.id for one in check(run).findings if one.severity == "error"] == ["PB369"] * count


def test_a_command_that_trains_nothing_is_refused(run_of) -> None:
    with pytest.raises(RunConfigError, match="starts megatron export, which converts a checkpoint and trains nothing"):
        run_of("#!/bin/bash\npython swift/cli/_megatron/export.py --model org/a-model --to_mcore true\n", "run.sh")


def test_a_file_that_is_not_there_is_named(run_of) -> None:
    with pytest.raises(RunConfigError, match=r"with the file gone\.yaml, which is not found from here"):
        run_of("#!/bin/bash\nmegatron sft gone.yaml --bf16 true\n", "run.sh")


def test_the_group_train_of_a_file_for_ray_stands_over_the_arguments_of_all_roles(run_of) -> None:
    text = (
        "rlhf_type: grpo\nmodel: org/a-model\ndataset: d\nmicro_batch_size: 2\nbf16: true\n"
        "tensor_model_parallel_size: 1\n"
        "train: {gpus: 4, tuner_type: lora, tensor_model_parallel_size: 2}\n"
        "rollout: {gpus: 4, vllm_tensor_parallel_size: 4}\nteacher: {gpus: 2, model: org/a-teacher}\n"
    )
    of_the_file = run_of(text, "conf/grpo.yaml")
    launch = '#!/bin/bash\nmegatron rlhf --use_ray true --config "$HERE/conf/grpo.yaml"\n'
    for run in (of_the_file, run_of(launch, "run.sh")):
        assert run.model["tensor_model_parallel_size"] == 2
        assert run.reading.generation == {"vllm_tensor_parallel_size": 4}
        lines = " ".join(run.reading.lines)
        assert "The number of GPUs: train.gpus=4. Add --target h100x4, for example." in lines
        assert run.section("peft")["type"] == "LoraParallelLinear"


MODEL_WORDS = "--bf16 true --tuner_type lora --lora_rank 16 --lora_dropout 0"


@pytest.mark.parametrize(
    ("words", "targets", "excluded"),
    [
        ("", [], ["router"]),
        ("--target_modules all-linear all-router", [], []),
        ("--target_modules linear_qkv", ["linear_qkv", "*.linear_qkv"], None),
    ],
)
def test_lora_trains_adapters_of_the_linear_layers_that_are_named(run_of, words: str, targets, excluded) -> None:
    run = run_of(f"#!/bin/bash\n{COMMAND} {MODEL_WORDS} {words}\n", "run.sh")
    peft = run.section("peft")
    assert (peft["type"], peft["dim"], peft["dropout"]) == ("LoraParallelLinear", 16, 0)
    assert (peft["target_modules"], peft.get("exclude_modules")) == (targets, excluded)
    assert peft["share_expert_adapters"] is False
    assert "counted as trained" not in " ".join(run.reading.lines)


@pytest.mark.parametrize(
    "words",
    [
        "--tuner_type lora_llm",
        "--tuner_type lora --modules_to_save word_embeddings",
        "--tuner_type lora --lora_rank $RANK",
        "--adapters out/checkpoint-1",
    ],
)
def test_adapters_whose_layers_are_not_known_are_named_and_all_weights_count(run_of, words: str) -> None:
    run = run_of(f"#!/bin/bash\n{COMMAND} --bf16 true {words}\n", "run.sh")
    assert not run.section("peft")
    assert "weights are frozen and adapters train; all weights are counted as trained" in " ".join(run.reading.lines)


@pytest.mark.parametrize(
    ("words", "is_named"),
    [
        ("--rlhf_type dpo", True),
        ("--rlhf_type grpo --beta 0", True),
        ("--rlhf_type rm", False),
        ("--rlhf_type dpo --tuner_type lora", False),
    ],
)
def test_full_training_from_preferences_loads_a_reference_model(run_of, words: str, is_named: bool) -> None:
    command = COMMAND.replace("megatron sft", "megatron rlhf")
    run = run_of(f"#!/bin/bash\n{command} --bf16 true {words}\n", "run.sh")
    assert ("a reference model computes too" in " ".join(run.reading.lines)) is is_named


def test_a_frozen_vision_tower_leaves_the_weights_that_are_counted_as_they_are(run_of) -> None:
    run = run_of(f"#!/bin/bash\n{COMMAND} --bf16 true --freeze_vit true --freeze_aligner true\n", "run.sh")
    assert "counted as trained" not in " ".join(run.reading.lines)


@pytest.mark.parametrize(("value", "has_plan"), [("0", False), ("1", True)])
def test_linear_attention_of_transformers_has_no_plan(run_of, tmp_path, value: str, has_plan: bool) -> None:
    folder = tmp_path / "org" / "a-model"
    folder.mkdir(parents=True)
    text = {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    run = run_of(f"#!/bin/bash\nexport USE_MCORE_GDN={value}\n{COMMAND} --bf16 true\n", "run.sh")
    assert (run.reading.uncertainty.no_plan_reason is None) is has_plan


@pytest.mark.parametrize(
    ("words", "length"),
    [
        ("--rlhf_type grpo", 2048 + 512),
        ("--rlhf_type gkd --max_completion_length 4096", 2048 + 4096),
        ("--rlhf_type dpo", 2 * 2048),
        ("--rlhf_type rm --packing true", 2048),
        ("--rlhf_type kto", 2048),
    ],
)
def test_a_sample_is_a_prompt_with_its_completion_or_a_pair_of_texts(run_of, words: str, length: int) -> None:
    run = run_of(f"#!/bin/bash\n{COMMAND.replace('sft', 'rlhf')} {words}\n", "run.sh")
    assert run.model["seq_length"] == length


def test_further_turns_of_a_sample_are_named(run_of) -> None:
    words = "--rlhf_type grpo --multi_turn_scheduler gym"
    run = run_of(f"#!/bin/bash\n{COMMAND.replace('sft', 'rlhf')} {words}\n", "run.sh")
    assert "multi_turn_scheduler" in run.reading.uncertainty.unread_options
    assert "multi_turn_scheduler=gym: a sample may have further turns; one completion is counted." in run.reading.lines


def test_settings_of_experts_are_not_reported_of_a_model_without_experts(tmp_path) -> None:
    config = {"model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}), encoding="utf-8")
    (tmp_path / "run.sh").write_text(f"#!/bin/bash\n{COMMAND}\n", encoding="utf-8")
    run = load_run(config_file=tmp_path / "run.sh", choice=RunChoice(checkpoint=str(tmp_path)))
    assert [one for one in check(run).findings if one.path == "model.moe_router_dtype"] == []


def test_a_target_with_a_number_of_gpus_is_not_asked_for_twice(run_of) -> None:
    sentence = "The number of GPUs: NPROC_PER_NODE=8 and NNODES=1. Add --target h100x8, for example."
    assert sentence in run_of(f"#!/bin/bash\n{COMMAND}\n", "run.sh").reading.lines
    assert sentence not in run_of(f"#!/bin/bash\n{COMMAND}\n", "run.sh", "target=h100x8").reading.lines


def test_experts_are_not_split_by_tensor_parallelism_unless_it_is_stated(run_of) -> None:
    layout = "--tensor_model_parallel_size 4 --expert_model_parallel_size 4 --pipeline_model_parallel_size 2"
    run = run_of(f"#!/bin/bash\n{COMMAND} --bf16 true {layout}\n", "run.sh", "target=h100x8")
    assert run.model["expert_tensor_parallel_size"] == 1
    assert [one for one in check(run).findings if one.severity == "error"] == []
    run = run_of(f"#!/bin/bash\n{COMMAND} {layout} --expert_tensor_parallel_size 4\n", "run.sh")
    assert run.model["expert_tensor_parallel_size"] == 4


def test_fusions_and_outputs_of_stages_are_those_of_its_arguments(run_of) -> None:
    run = run_of(f"#!/bin/bash\n{COMMAND}\n", "run.sh")
    assert (run.model["bias_activation_fusion"], run.model["deallocate_pipeline_outputs"]) == (True, True)
    run = run_of(f"#!/bin/bash\n{COMMAND} --bias_activation_fusion false\n", "run.sh")
    assert run.model["bias_activation_fusion"] is False


def test_a_decoupled_projection_of_linear_attention_is_named(run_of) -> None:
    run = run_of(f"#!/bin/bash\n{COMMAND} --linear_decoupled_in_proj true\n", "run.sh")
    assert any(line.startswith("linear_decoupled_in_proj=True: in_proj is two layers") for line in run.reading.lines)


def test_a_variable_behind_an_option_is_its_value(run_of) -> None:
    words = '--val_dataset "$VALID" --output_dir $(pwd)/out --tuner_type lora $EXTRA_ARGS "$@"'
    run = run_of(f"#!/bin/bash\n{COMMAND} {words}\n", "run.sh")
    sources = [one for one in run.reading.uncertainty.open_points if "may hold further arguments" in one]
    assert [one.partition(":")[0] for one in sources] == ["$EXTRA_ARGS", "$@"]
