"""verl's launch scripts: the actor's engine, its overrides, and what verl states itself."""

from pathlib import Path

import pytest

from bridge.errors import RunConfigError, UnreadFileError
from bridge.front.loader import load_run
from bridge.preflight.rule_check import check

SCRIPT = """#!/bin/bash
set -xeuo pipefail
TP=${TP:-4}
ACTOR=(
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${TP}
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
)
python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml \\
    actor_rollout_ref.model.path=org/a-model actor_rollout_ref.rollout.quantization=fp8 \\
    "${ACTOR[@]}" WORDS "$@"
"""
FP8 = (
    "+actor_rollout_ref.actor.megatron.override_transformer_config.fp8=e4m3 "
    "+actor_rollout_ref.actor.megatron.override_transformer_config.fp8_recipe=blockwise "
    "+actor_rollout_ref.actor.optim.override_optimizer_config.fp8_recipe=blockwise"
)


def script(words: str = "") -> str:
    return SCRIPT.replace("WORDS", words)


def test_overrides_reach_the_configs_of_megatron(run_of) -> None:
    run = run_of(script(FP8), "run.sh")
    model = run.model
    assert (model["fp8"], model["fp8_recipe"], run.section("optimizer")["fp8_recipe"]) == (
        *("e4m3", "blockwise"),
        "blockwise",
    )
    assert (model["tensor_model_parallel_size"], model["pipeline_model_parallel_size"]) == (4, 2)
    assert (model["seq_length"], run.section("train")["micro_batch_size"]) == (8192, 1)
    assert run.reading.generation["actor_rollout_ref.rollout.quantization"] == "fp8"
    assert run.find_decider("model.num_layers") == "config.json of org/a-model"
    assert [one for one in check(run).findings if one.severity == "error"] == []


OVERRIDE = "+actor_rollout_ref.actor.megatron.override_transformer_config"


def list_unknown_overrides(run) -> list[str]:
    """Return the fields that the check names as unknown to Megatron Bridge."""
    found = [one for one in check(run).findings if one.path.startswith(OVERRIDE.lstrip("+"))]
    assert all((one.id, one.severity) == ("PB801", "warning") for one in found)
    return [one.path.rpartition(".")[2] for one in found]


def test_an_override_that_no_release_has_stops_megatron_bridge(run_of) -> None:
    words = f"{OVERRIDE}.use_flash_attn=True {OVERRIDE}.moe_permute_fusion=True {OVERRIDE}.seq_length=4096"
    run = run_of(script(words), "run.sh")
    assert list_unknown_overrides(run) == ["use_flash_attn"]
    (finding,) = [one for one in check(run).findings if one.path.endswith("use_flash_attn")]
    assert finding.rule == (
        "no known release of Megatron Core has this field, and with such a release Megatron Bridge from 0.5.0 on "
        "stops at the start (models/model_provider.py apply_overrides_and_finalize)"
    )


@pytest.mark.parametrize("word", ["trainer.device=npu", "actor_rollout_ref.actor.megatron.vanilla_mbridge=True"])
def test_an_override_of_mindspeed_or_mbridge_is_not_reported(run_of, word: str) -> None:
    assert list_unknown_overrides(run_of(script(f"{OVERRIDE}.use_flash_attn=True {word}"), "run.sh")) == []


def test_a_misspelt_override_is_reported_once(run_of) -> None:
    run = run_of(script(f"{OVERRIDE}.moe_permute_fusoin=True"), "run.sh")
    assert [one.id for one in check(run).findings if "fusoin" in one.path] == ["PB122"]


def test_the_number_of_gpus_is_named_with_its_keys(run_of) -> None:
    run = run_of(script("trainer.nnodes=1 trainer.n_gpus_per_node=8"), "run.sh")
    sentence = "The number of GPUs: trainer states nnodes=1 and n_gpus_per_node=8. Add --target h100x8, for example."
    assert sentence in run.reading.uncertainty.open_points


def test_a_check_of_megatron_lms_parser_is_a_warning_where_no_such_parser_runs(run_of) -> None:
    offloaded = "+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True"
    run = run_of(script(offloaded), "run.sh")
    assert [one.severity for one in check(run).findings if one.id == "PB341"] == ["warning"]


def test_defaults_of_its_own_files_are_set_at_start(run_of) -> None:
    run = run_of(script(), "run.sh")
    wanted = {
        "model.bf16": True,
        "optimizer.bf16": True,
        "model.params_dtype": "bf16",
        "model.pipeline_dtype": "bf16",
        "model.sequence_parallel": True,
        "ddp.use_distributed_optimizer": True,
        "ddp.grad_reduce_in_fp32": True,
    }
    for path, value in wanted.items():
        role, _, name = path.partition(".")
        assert run.section(role)[name] == value, path
        assert run.origin_of(path) == "verl at start", path


def test_the_older_bridge_sets_the_load_balancing_of_the_router_itself(run_of) -> None:
    setting = "model.moe_router_load_balancing_type"
    run = run_of(script("actor_rollout_ref.actor.megatron.vanilla_mbridge=True"), "run.sh")
    assert [derived for derived in run.reading.derived if derived.path == setting] == []
    assert run.find_decider(setting) == "config.json of org/a-model"
    run = run_of(script("actor_rollout_ref.actor.megatron.vanilla_mbridge=False"), "run.sh")
    assert run.model["moe_router_load_balancing_type"] == "none"


@pytest.mark.parametrize(
    ("words", "reduced_in_fp32"),
    [
        ("", True),
        ("actor_rollout_ref.actor.optim.use_precision_aware_optimizer=True", True),
        (
            "actor_rollout_ref.actor.optim.use_precision_aware_optimizer=True "
            "actor_rollout_ref.actor.optim.main_grads_dtype=bf16",
            False,
        ),
        ("+actor_rollout_ref.actor.optim.override_optimizer_config.use_precision_aware_optimizer=True", True),
        ("+actor_rollout_ref.actor.megatron.override_ddp_config.grad_reduce_in_fp32=False", False),
    ],
)
def test_gradients_are_reduced_in_the_dtype_of_the_main_gradients(run_of, words: str, reduced_in_fp32: bool) -> None:
    run = run_of(script(words), "run.sh")
    assert run.section("ddp").get("grad_reduce_in_fp32", False) is reduced_in_fp32


def test_float16_takes_the_precision_aware_optimizer_and_a_loss_scale(run_of) -> None:
    run = run_of(script("actor_rollout_ref.actor.megatron.dtype=float16"), "run.sh")
    optimizer = run.section("optimizer")
    assert (run.model["fp16"], run.model["bf16"], optimizer["fp16"]) == (True, False, True)
    assert (optimizer["use_precision_aware_optimizer"], optimizer["initial_loss_scale"]) == (True, 32768)
    assert optimizer["store_param_remainders"] is False
    assert "PB146" not in {one.id for one in check(run).findings}  # its own loop does not check the loss


def test_an_override_of_our_command_line_is_one_of_its_configuration(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(script())
    megatron = "actor_rollout_ref.actor.megatron"
    words = [f"{megatron}.dtype=float16", f"{megatron}.use_distributed_optimizer=false", "trainer.nnodes=3"]
    run = load_run(config_file=path, overrides=words, strict=False)
    assert (run.model["fp16"], run.origin_of("model.fp16")) == (True, "command line")
    assert run.section("optimizer")["use_distributed_optimizer"] is False
    assert run.section("ddp")["use_distributed_optimizer"] is False
    with pytest.raises(RunConfigError, match="no such section"):
        load_run(config_file=path, overrides=["actor_rollout_ref.actor.dtype=float16"], strict=False)
    with pytest.raises(UnreadFileError, match="with the strategy fsdp"):
        load_run(config_file=path, overrides=["actor_rollout_ref.actor.strategy=fsdp"], strict=False)


def test_a_dtype_that_its_engine_refuses_is_an_error(run_of) -> None:
    run = run_of(script("actor_rollout_ref.actor.megatron.dtype=float32"), "run.sh")
    (finding,) = [one for one in check(run).findings if one.id == "PB134"]
    assert (finding.path, finding.value) == ("actor_rollout_ref.actor.megatron.dtype", "float32")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("python3 -m verl.trainer.main_ppo data.x=1", "with the strategy fsdp, which trains on PyTorch"),
        ("python3 -m verl.trainer.main_ppo model_engine=veomni", "with the strategy veomni, which trains on PyTorch"),
        ("python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=fsdp2", "strategy fsdp2, which trains"),
        ("python3 -m verl.trainer.main_ppo model_engine=$ENGINE", r"strategy \$ENGINE, which only the run knows"),
        (
            "python3 -m verl.trainer.main_ppo hydra.searchpath=[pkg://other.config] "
            "actor@actor_rollout_ref.actor=other_actor",
            "with the actor other_actor, which is not a file of verl. Its strategy is not known from here",
        ),
        (
            "python3 -m verl.trainer.main_ppo actor@actor_rollout_ref.actor=$ACTOR",
            r"strategy \$ACTOR, which only the run knows",
        ),
        (
            "python3 -m verl.trainer.main_ppo actor@actor_rollout_ref.actor=veomni_actor",
            "with the strategy veomni, which trains on PyTorch",
        ),
        ("torchrun -m verl.trainer.sft_trainer optim.lr=1e-5", "with the strategy fsdp, which trains on PyTorch"),
        ("python3 -m verl.trainer.main_generation data.x=1", "generates or evaluates samples and trains nothing"),
    ],
)
def test_other_engines_are_named_as_none_of_megatron_core(run_of, words: str, sentence: str) -> None:
    with pytest.raises(RunConfigError, match=sentence):
        run_of(f"#!/bin/bash\n{words}\n", "run.sh")


def test_a_refusal_names_the_runs_of_the_script_that_train_on_megatron_core(run_of) -> None:
    start = "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy"
    with pytest.raises(UnreadFileError) as raised:
        run_of(f"#!/bin/bash\n{start}=fsdp2\n{start}=fsdp\n{start}=megatron\n", "run.sh")
    (note,) = raised.value.__notes__
    assert "--launch 3 is line 4" in note
    assert "run 2 trains nothing on Megatron Core" in note
    with pytest.raises(UnreadFileError) as raised:
        run_of(f"#!/bin/bash\n{start}=fsdp2\n{start}=fsdp\n", "run.sh")
    assert not hasattr(raised.value, "__notes__")


def test_a_file_of_the_group_actor_states_the_strategy(run_of) -> None:
    words = (
        "python3 -m verl.trainer.main_ppo actor@actor_rollout_ref.actor=megatron_actor "
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
    )
    run = run_of(f"#!/bin/bash\n{words}\n", "run.sh")
    assert run.model["tensor_model_parallel_size"] == 2


def test_the_number_of_gpus_of_the_trainer_is_that_of_the_run(run_of) -> None:
    run = run_of(script("trainer.nnodes=2 trainer.n_gpus_per_node=16"), "run.sh")
    assert (run.prediction.gpus, run.prediction.parallel.world_size, run.prediction.parallel.data) == (32, 32, 4)
    assert "Add --target h100x32, for example." in " ".join(run.reading.lines)


def test_a_run_on_npus_has_no_gpus_and_the_release_of_megatron_core_of_its_guide(run_of) -> None:
    run = run_of(script("trainer.device='npu' trainer.nnodes=2 trainer.n_gpus_per_node=16"), "run.sh")
    lines = " ".join(run.reading.lines)
    assert "h100" not in lines
    assert "trainer.device=npu: MindSpeed changes Megatron Core for NPUs of Ascend." in lines
    assert str(run.reading.release.version) == "0.16.1"
    assert "trainer.device" in run.prediction.unread_options


def test_a_script_with_a_variable_of_npus_counts_as_one_on_npus(run_of) -> None:
    word = "+actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn=True"
    text = f"{word} trainer.nnodes=2 trainer.n_gpus_per_node=16"
    run = run_of(script(text).replace("set -x", "export HCCL_CONNECT_TIMEOUT=9\nset -x"), "run.sh")
    lines = " ".join(run.reading.lines)
    assert "HCCL_CONNECT_TIMEOUT is set, which NPUs of Ascend alone read" in lines
    assert ("h100" in lines, str(run.reading.release.version)) == (False, "0.16.1")
    assert run.reading.option_faults.misdirected == ()


def test_a_variable_states_the_engine(tmp_path: Path) -> None:
    from bridge.preflight.run_choice import RunChoice

    path = tmp_path / "run.sh"
    path.write_text("python3 -m verl.trainer.main_ppo model_engine=$ENGINE data.x=1\n")
    run = load_run(config_file=path, strict=False, choice=RunChoice(variables={"ENGINE": "megatron"}))
    assert run.reading.framework == "verl"


def test_supervised_training_has_its_engine_in_the_place_of_the_actors(run_of) -> None:
    words = (
        "torchrun --nnodes=2 --nproc_per_node=4 -m verl.trainer.sft_trainer "
        "optim.lr=1e-5 optim=megatron engine=megatron "
        "engine.tensor_model_parallel_size=2 +engine.override_transformer_config.fp8=hybrid model.path=org/a-model\n"
    )
    run = run_of(words, "run.sh")
    assert (run.model["tensor_model_parallel_size"], run.model["fp8"]) == (2, "hybrid")
    assert run.prediction.gpus == 8
    assert run.section("optimizer")["lr"] == 1e-5


def test_a_whole_configuration_is_read_and_a_part_of_one_is_not(run_of) -> None:
    run = run_of(
        "actor_rollout_ref:\n  actor:\n    strategy: megatron\n"
        "    megatron: {dtype: bfloat16, tensor_model_parallel_size: 1, sequence_parallel: true}\n"
        "  model: {path: org/a-model}\n",
        "run.yaml",
    )
    assert run.model["bf16"] is True
    assert run.model["sequence_parallel"] is False
    with pytest.raises(RunConfigError, match="looks like verl"):
        run_of("actor_rollout_ref: {actor: {strategy: fsdp}}\n", "fsdp.yaml")


def test_fused_kernels_leave_memory_without_a_verdict(run_of) -> None:
    key = "actor_rollout_ref.model.use_fused_kernels"
    fused, plain = (run_of(script(f"{key}={value}"), "run.sh") for value in (True, False))
    assert f"{key}=True: logits are not stored" in " ".join(fused.reading.uncertainty.open_points)
    assert (key in fused.prediction.unread_options, key in plain.prediction.unread_options) == (True, False)


def test_quantisation_aware_training_has_no_plan(run_of) -> None:
    run = run_of(script("actor_rollout_ref.actor.megatron.qat.enable=True"), "run.sh")
    assert "ModelOpt rounds weights to FP4" in str(run.reading.uncertainty.no_plan_reason)


def test_an_adapter_trains_in_the_place_of_the_model_and_needs_no_reference(run_of) -> None:
    kl = "actor_rollout_ref.actor.use_kl_loss=True"
    reference = "a reference model computes too, and its weights are not counted"
    whole = run_of(script(kl), "whole.sh")
    assert any(reference in line for line in whole.reading.uncertainty.open_points)
    words = f"{kl} actor_rollout_ref.model.lora.rank=16 actor_rollout_ref.model.lora.target_modules=['linear_proj']"
    run = run_of(script(words), "run.sh")
    assert run.section("peft")["dim"] == 16
    assert run.section("peft")["target_modules"] == ["linear_proj"]
    assert run.reading.uncertainty.unread_options == ()
    assert not any(reference in line for line in run.reading.uncertainty.open_points)
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512}
    planned = load_run(config_file=Path(run.name), overrides=[f"model.{name}={size}" for name, size in sizes.items()])
    adapters = [module.name for layer in planned.plan.layers for module in layer.modules if "adapter" in module.name]
    assert set(adapters) == {"linear_proj.adapter.linear_in", "linear_proj.adapter.linear_out"}


@pytest.mark.parametrize(("rank", "is_open"), [("0", False), ("$RANK_OF_THE_ADAPTER", True)])
def test_a_rank_that_only_the_run_knows_leaves_the_trained_weights_open(run_of, rank: str, is_open: bool) -> None:
    run = run_of(script(f"actor_rollout_ref.model.lora.rank={rank}"), "run.sh")
    assert not run.section("peft")
    assert bool(run.reading.uncertainty.unread_options) == is_open
    assert (
        any(
            "adapters train; all weights are counted as trained" in line for line in run.reading.uncertainty.open_points
        )
        == is_open
    )
