"""FlagScale's files of a training: blocks of Megatron-LM's arguments, which are flattened into a command line."""

import pytest

from bridge.errors import UnreadFileError
from bridge.preflight.rule_check import check

TRAINING = """\
system:
  tensor_model_parallel_size: 2
  sequence_parallel: true
  use_distributed_optimizer: true
  precision: {bf16: true, attention_softmax_in_fp32: true, accumulate_allreduce_grads_in_fp32: false}
  MORE
model:
  num_layers: 4
  hidden_size: 512
  num_attention_heads: 8
  seq_length: 1024
  swiglu: true
  multiple_of: 256
  disable_bias_linear: true
  micro_batch_size: 2
  optimizer: {clip_grad: 1.0, lr_scheduler: {lr: 3.0e-4}}
data:
  tokenizer: {tokenizer_type: QwenTokenizerFS, vocab_size: 32000}
"""


def test_blocks_become_arguments_of_megatron_lm(run_of) -> None:
    run = run_of(TRAINING.replace("MORE", "recompute_granularity: full"), "7b.yaml")
    assert (run.reading.framework, run.reading.settings_of) == ("FlagScale", "Megatron-LM")
    assert run.model["bf16"] is True
    assert run.model["add_bias_linear"] is False
    assert run.section("ddp")["grad_reduce_in_fp32"] is True  # Megatron-LM's checks, under bf16
    assert run.section("optimizer")["clip_grad"] == 1.0
    assert run.origin_of("model.num_layers") == "7b.yaml"
    assert run.plan.shape.vocab_size == 32000
    assert [one for one in check(run).findings if one.severity == "error"] == []


def test_the_width_of_swiglu_is_rounded_up(run_of) -> None:
    assert run_of(TRAINING.replace("  MORE\n", ""), "7b.yaml").model["ffn_hidden_size"] == 1536
    scaled = TRAINING.replace("MORE", "hidden_dim_multiplier: 1.3")
    assert run_of(scaled, "7b.yaml").model["ffn_hidden_size"] == 1792


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("hetero: {enable_hetero: true}", "model.tensor_model_parallel_size"),
        ("use_dualpipev: true", "model.virtual_pipeline_model_parallel_size"),
    ],
)
def test_a_name_of_its_own_leaves_memory_without_a_verdict(run_of, line: str, path: str) -> None:
    run = run_of(TRAINING.replace("MORE", line), "7b.yaml")
    assert run.reading.uncertainty.unread_options
    assert path in run.reading.uncertainty.unread_sources


def test_the_sizes_of_meshes_leave_open_what_they_may_set_and_no_other_field(run_of) -> None:
    lines = "expert_tensor_parallel_size_per_process_mesh: [1, 1]"
    run = run_of(TRAINING.replace("MORE", lines), "7b.yaml")
    assert set(run.reading.uncertainty.unread_sources) == {"model.expert_tensor_parallel_size"}
    assert "not read here; the layout" not in " ".join(run.reading.lines)


def test_adapters_train_in_the_place_of_the_weights(run_of) -> None:
    lines = "peft_type: lora\n  lora_dim: 32\n  lora_target_modules: [linear_qkv]"
    run = run_of(TRAINING.replace("MORE", lines), "7b.yaml")
    assert run.section("peft")["dim"] == 32
    names = [module.name for layer in run.plan.layers for module in layer.modules if module.kind == "adapter"]
    assert set(names) == {"linear_qkv.adapter.linear_in", "linear_qkv.adapter.linear_out"}
    assert [one for one in check(run).findings if "asserts at the start" in one.rule] == []


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("num_experts: 8", "FlagScale asserts at the start that a model with adapters has no experts"),
        ("recompute_granularity: full", "FlagScale asserts at the start that a run with adapters recomputes nothing"),
    ],
)
def test_adapters_that_its_start_refuses_are_a_finding(run_of, line: str, rule: str) -> None:
    run = run_of(TRAINING.replace("MORE", f"peft_type: lora\n  {line}"), "7b.yaml")
    (finding,) = [one for one in check(run).findings if one.path.endswith("peft_type")]
    assert (finding.rule, finding.severity) == (rule, "warning")


def experiment(program: str, name: str) -> str:
    return (
        f"defaults:\n- train: {name}\n- _self_\nexperiment:\n  task: {{type: train, entrypoint: ./train/{program}}}\n"
    )


def test_a_program_with_a_model_of_its_own_has_no_plan(run_of, tmp_path) -> None:
    (tmp_path / "train.yaml").write_text(experiment("train_rwkv.py", "3b"))
    run = run_of(TRAINING.replace("  MORE\n", ""), "train/7b.yaml")
    sentence = "experiment.task.entrypoint=./train/train_rwkv.py: the program builds its model by code of its own"
    assert run.reading.uncertainty.no_plan_reason is not None
    assert run.reading.uncertainty.no_plan_reason.startswith(sentence)
    note = "experiment.task.entrypoint: read from train.yaml, whose defaults name another file of this folder."
    assert note in run.reading.lines
    assert not [one for one in check(run).findings if one.id == "PB132"]


@pytest.mark.parametrize(("program", "is_planned"), [("train_gpt.py", True), ("train_rwkv.py", False)])
def test_the_experiment_that_names_the_file_goes_before_others(run_of, tmp_path, program: str, is_planned) -> None:
    (tmp_path / "a.yaml").write_text(experiment("train_gpt.py", "3b"))
    (tmp_path / "b.yaml").write_text(experiment(program, "7b"))
    run = run_of(TRAINING.replace("  MORE\n", ""), "train/7b.yaml")
    assert (run.reading.uncertainty.no_plan_reason is None) is is_planned


def test_a_program_with_a_vision_tower_leaves_memory_without_a_verdict(run_of, tmp_path) -> None:
    (tmp_path / "train.yaml").write_text(experiment("train_llava.py", "7b"))
    run = run_of(TRAINING.replace("  MORE\n", ""), "train/7b.yaml")
    assert run.reading.uncertainty.no_plan_reason is None
    assert "task.entrypoint" in run.reading.uncertainty.unread_options
    assert not [line for line in run.reading.lines if "name another file" in line]


def test_a_program_with_a_vision_tower_may_set_settings_of_the_layers(run_of, tmp_path) -> None:
    (tmp_path / "train.yaml").write_text(experiment("train_llava_onevision.py", "7b"))
    run = run_of(TRAINING.replace("  MORE\n", ""), "train/7b.yaml")
    assert run.find_decider("model.add_qkv_bias") == "task.entrypoint"
    set_at_start = [line for line in run.reading.lines if line.startswith("Megatron-LM sets at start")]
    assert not [line for line in set_at_start if "bias_activation_fusion" in line]


EXPERIMENT = """\
defaults:
- train: 7b
- _self_
experiment:
  task: {type: train, backend: megatron, entrypoint: ./train/PROGRAM}
  runner: {nnodes: 2, nproc_per_node: 8HOSTS}
  envs: {CUDA_VISIBLE_DEVICES: "0,1,2,3", NVTE_FLASH_ATTN: 0}
action: run
"""


def test_an_experiment_is_read_with_the_arguments_that_it_names(run_of, tmp_path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "7b.yaml").write_text(TRAINING.replace("  MORE\n", ""))
    text = EXPERIMENT.replace("HOSTS", "")
    run = run_of(text.replace("PROGRAM", "train_gpt.py"), "run.yaml")
    plain = run_of(TRAINING.replace("  MORE\n", ""), "train/7b.yaml")
    assert run.sections == plain.sections
    assert run.reading.training_gpus == 4
    assert run.reading.environment["NVTE_FLASH_ATTN"] == "0"
    assert not [line for line in run.reading.lines if line.startswith("An experiment's file")]
    hosts = run_of(EXPERIMENT.replace("HOSTS", ", hostfile: hosts"), "run.yaml")
    assert hosts.reading.training_gpus is None
    assert hosts.reading.uncertainty.no_plan_reason is not None


def test_an_experiment_whose_arguments_are_not_found_names_them(run_of) -> None:
    with pytest.raises(UnreadFileError, match=r"names train/7b\.yaml, which is not found from here"):
        run_of(EXPERIMENT, "run.yaml")


def test_an_experiment_that_tries_sizes_is_not_read(run_of) -> None:
    with pytest.raises(UnreadFileError, match="which starts the task that `experiment.task` names"):
        run_of(EXPERIMENT.replace("action: run", "action: auto_tune"), "run.yaml")
