"""NeMo-RL's files: which settings reach Megatron Core, which its code drops, and what it sets at start."""

from pathlib import Path

import pytest

from bridge.cli.main import main
from bridge.errors import RunConfigError, UnreadFileError
from bridge.front.loader import load_run
from bridge.preflight.rule_check import check
from bridge.read.run_file import load_file_reading

SIZES = ("model.num_layers=4", "model.hidden_size=512", "model.num_attention_heads=8")
BASE = """
policy:
  model_name: org/a-model
  precision: bfloat16
  train_global_batch_size: 64
  train_micro_batch_size: 2
  max_total_sequence_length: 1024
  sequence_packing:
    {enabled: true, train_mb_tokens: "${mul:${policy.max_total_sequence_length}, ${..train_micro_batch_size}}"}
  dtensor_cfg: {enabled: true}
  megatron_cfg:
    enabled: false
    activation_checkpointing: false
    recompute_granularity: selective
    tensor_model_parallel_size: 1
    pipeline_model_parallel_size: 1
    pipeline_dtype: ${policy.precision}
    moe_router_dtype: fp64
    moe_per_layer_logging: true
    optimizer: {optimizer: adam, bf16: true, use_distributed_optimizer: true, use_precision_aware_optimizer: true}
    distributed_data_parallel_config:
      {grad_reduce_in_fp32: false, overlap_grad_reduce: true, overlap_param_gather: true, use_custom_fsdp: false}
    fp8_cfg: {enabled: false, fp8: e4m3, fp8_recipe: blockwise, fp8_param: false}
  generation: {backend: vllm, vllm_cfg: {precision: "${policy.precision}"}}
cluster: {num_nodes: 2, gpus_per_node: 8}
grpo: {max_num_steps: 5}
"""
CHILD = """
defaults: base.yaml
policy:
  dtensor_cfg: {enabled: false}
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: 2
    first_last_layers_bf16: true
    num_layers_at_start_in_bf16: 2
    moe_router_enable_expert_bias: true
    te_precision_config_file: te.yaml
    env_vars: {NVTE_FP8_BLOCK_SCALING_FP32_SCALES: 1, EMPTY: null}
    fp8_cfg: {enabled: true, fp8: hybrid, fp8_recipe: mxfp8, fp8_param: true}
  generation: {vllm_cfg: {precision: fp8}}
"""


@pytest.fixture
def child(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    path = tmp_path / "run.yaml"
    path.write_text(CHILD)
    return path


def test_a_file_is_read_with_those_that_it_inherits_from(child: Path) -> None:
    run = load_run(config_file=child, strict=False)
    model, optimizer, ddp = (run.section(name) for name in ("model", "optimizer", "ddp"))
    assert (model["bf16"], model["fp16"], model["params_dtype"], model["pipeline_dtype"]) == (
        *(True, False),
        *("bfloat16", "bfloat16"),
    )
    assert (model["fp8"], model["fp8_recipe"], model["fp8_param"]) == ("hybrid", "mxfp8", True)
    assert (model["tensor_model_parallel_size"], model["moe_router_dtype"]) == (2, "fp64")
    assert (model["seq_length"], run.section("train")["micro_batch_size"]) == (2048, 1)
    assert "recompute_granularity" not in model
    assert optimizer["use_precision_aware_optimizer"] is True
    assert ddp["grad_reduce_in_fp32"] is False
    assert run.reading.framework == "NeMo-RL"
    assert run.reading.environment == {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
    assert run.reading.generation["policy.generation.vllm_cfg.precision"] == "fp8"
    assert "defaults: base.yaml is read below the file." in run.reading.notes


@pytest.mark.parametrize(
    ("words", "count", "sentence"),
    [
        ([], 16, "cluster states num_nodes=2 and gpus_per_node=8. Add --target h100x16"),
        (
            ["generation.colocated={enabled: false, resources: {num_nodes: 1, gpus_per_node: 8}}"],
            8,
            "cluster states num_nodes=2 and gpus_per_node=8, and generation has 1 of these nodes. Add --target h100x8",
        ),
        (
            ["generation.colocated={enabled: false, resources: {num_nodes: null, gpus_per_node: 2}}", "NODES=1"],
            6,
            "cluster states num_nodes=1 and gpus_per_node=8, and generation has 2 of these GPUs. Add --target h100x6",
        ),
        (
            ["generation.colocated={enabled: false, resources: {num_nodes: null}}"],
            None,
            "and policy.generation.colocated.enabled=False has some of them. Add a target with the GPUs of training",
        ),
    ],
)
def test_the_gpus_of_training_are_those_that_generation_does_not_have(
    tmp_path: Path, words: list[str], count: int | None, sentence: str
) -> None:
    text = BASE.replace("megatron_cfg:\n    enabled: false", "megatron_cfg:\n    enabled: true")
    text = text.replace("dtensor_cfg: {enabled: true}", "dtensor_cfg: {enabled: false}")
    for word in words:
        key, _, value = word.partition("=")
        if key == "NODES":
            text = text.replace("num_nodes: 2", f"num_nodes: {value}")
        else:
            text = text.replace("generation: {", f"generation: {{colocated: {value}, ")
    path = tmp_path / "run.yaml"
    path.write_text(text)
    run = load_run(config_file=path, strict=False)
    assert run.prediction.gpus == count
    assert sentence in " ".join(run.reading.lines)


def test_another_model_with_gpus_of_the_cluster_leaves_their_number_open(child: Path) -> None:
    child.write_text(CHILD + "on_policy_distillation: {non_colocated_teachers: {enabled: true}}\n")
    run = load_run(config_file=child, strict=False)
    assert run.prediction.gpus is None
    assert "on_policy_distillation.non_colocated_teachers.enabled=True has some of them" in " ".join(run.reading.lines)


def test_values_set_at_start_have_nemo_rl_as_their_origin(child: Path) -> None:
    run = load_run(config_file=child, strict=False)
    set_ = {one.path: one for one in run.reading.derived}
    for path in (
        *("ddp.fp8_param_gather", "ddp.use_distributed_optimizer", "optimizer.overlap_param_gather"),
        *("ddp.reuse_grad_buf_for_mxfp8_param_ag", "optimizer.reuse_grad_buf_for_mxfp8_param_ag"),
    ):
        assert set_[path].value is True
        assert run.origin_of(path) == "NeMo-RL at start"
        assert "nemo_rl/models/megatron/setup.py" in set_[path].source
        assert "7ea279ab" in set_[path].source
    assert run.origin_of("model.fp8") == "run.yaml"
    assert run.origin_of("ddp.grad_reduce_in_fp32") == "base.yaml"


def test_a_recipe_that_does_not_reach_the_optimizer_is_an_error(child: Path) -> None:
    report = check(load_run(config_file=child, strict=False))
    (finding,) = [one for one in report.findings if one.id == "PB124"]
    assert finding.severity == "error"
    assert "must equal optimizer.fp8_recipe, which is None" in finding.rule
    for key in ("policy.megatron_cfg.optimizer.fp8_recipe", "optimizer.fp8_recipe"):
        mended = check(load_run([f"{key}=mxfp8"], config_file=child, strict=False))
        assert [one for one in mended.findings if one.id == "PB124"] == []


def test_weights_in_bf16_do_not_ask_for_the_recipe_in_the_optimizer(child: Path) -> None:
    child.write_text(CHILD.replace("fp8_param: true", "fp8_param: false"))
    report = check(load_run(config_file=child, strict=False))
    assert [one for one in report.findings if one.id == "PB124"] == []


def test_layers_in_bf16_and_a_per_module_file_that_are_dropped_are_warned_of(child: Path) -> None:
    run = load_run(config_file=child, strict=False)
    dropped = {one.path: one for one in check(run).findings if one.id == "PB801"}
    assert dropped.keys() == {
        *("model.first_last_layers_bf16", "model.quant_recipe", "model.moe_router_enable_expert_bias"),
    }
    assert dropped["model.first_last_layers_bf16"].severity == "warning"
    assert "State policy.megatron_cfg.model_overrides.first_last_layers_bf16" in str(
        dropped["model.first_last_layers_bf16"]
    )
    assert dropped["model.moe_router_enable_expert_bias"].severity == "info"
    assert "first_last_layers_bf16" not in run.model


def test_the_place_that_a_remedy_names_is_forwarded(child: Path) -> None:
    text = CHILD.replace(
        "    first_last_layers_bf16: true\n    num_layers_at_start_in_bf16: 2\n",
        "    model_overrides: {first_last_layers_bf16: true, num_layers_at_start_in_bf16: 2}\n",
    )
    child.write_text(text)
    run = load_run(config_file=child, strict=False)
    assert (run.model["first_last_layers_bf16"], run.model["num_layers_at_start_in_bf16"]) == (True, 2)
    assert "model.first_last_layers_bf16" not in {one.path for one in check(run).findings if one.id == "PB801"}


def test_dropped_first_and_last_layers_are_no_finding_in_a_run_without_fp8(child: Path) -> None:
    """A dropped file of rows for single modules is one: it can turn FP8 on in such a run."""
    child.write_text(CHILD.replace("fp8_cfg: {enabled: true", "fp8_cfg: {enabled: false"))
    run = load_run(config_file=child, strict=False)
    assert run.model.get("fp8") is None
    found = {one.path for one in check(run).findings if one.id == "PB801"}
    assert found == {"model.moe_router_enable_expert_bias", "model.quant_recipe"}


def test_sizes_are_the_checkpoints_and_the_plan_rests_on_it(child: Path, capsys) -> None:
    assert main(["plan", "--config", str(child)]) == 2
    printed = capsys.readouterr().err
    assert "does not state model.num_layers, model.hidden_size, model.num_attention_heads" in printed
    assert "which config.json of org/a-model decides" in printed
    for command in ("plan", "memory"):
        assert main([command, "--config", str(child), *SIZES, "optimizer.fp8_recipe=mxfp8", "--target", "b200x16"]) == 0
        assert "config.json of org/a-model may" in capsys.readouterr().out


def test_explain_names_the_key_that_is_not_forwarded(child: Path, capsys) -> None:
    assert main(["explain", "model.first_last_layers_bf16", "--config", str(child)]) == 0
    printed = capsys.readouterr().out
    assert "config.json of org/a-model may set it" in printed
    assert "NeMo-RL does not forward policy.megatron_cfg.first_last_layers_bf16=True." in printed


def test_a_policy_on_dtensor_is_no_run_of_megatron_core(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    path = tmp_path / "fsdp.yaml"
    path.write_text("defaults: base.yaml\npolicy: {precision: float16}\n")
    with pytest.raises(RunConfigError, match="trains on PyTorch's DTensor here, without Megatron Core"):
        load_run(config_file=path)


def test_a_base_that_is_not_there_leaves_the_back_end_open(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("defaults: gone.yaml\npolicy: {precision: bfloat16}\n")
    with pytest.raises(RunConfigError, match=r"states neither .* `defaults` names gone.yaml, which is not found"):
        load_run(config_file=path)
    path.write_text("defaults: gone.yaml\npolicy: {precision: bfloat16, megatron_cfg: {enabled: true}}\n")
    run = load_run(config_file=path, strict=False)
    assert run.find_decider("optimizer.use_distributed_optimizer") == (
        "gone.yaml, which `defaults` names and which is not found"
    )
    assert check(run).findings == () or all(one.severity == "info" for one in check(run).findings)


@pytest.mark.parametrize(("precision", "mode"), [("float16", "fp16"), ("float32", None), ("bfloat16", "bf16")])
def test_the_precision_is_the_mode(child: Path, precision: str, mode: str | None) -> None:
    child.write_text(CHILD.replace("policy:\n", f"policy:\n  precision: {precision}\n", 1))
    run = load_run(config_file=child, strict=False)
    on = [name for name in ("bf16", "fp16") if run.model[name]]
    assert on == ([mode] if mode else [])


def test_a_precision_that_its_setup_does_not_know_is_an_error(child: Path) -> None:
    child.write_text(CHILD.replace("policy:\n", "policy:\n  precision: bf16\n", 1))
    (finding,) = [one for one in check(load_run(config_file=child, strict=False)).findings if one.id == "PB134"]
    assert (finding.path, finding.value) == ("policy.precision", "bf16")


def test_what_its_setup_refuses_is_an_error(child: Path) -> None:
    child.write_text(
        CHILD.replace(", fp8_param: true", "").replace(
            "    moe_router_enable", "    model_overrides: {first_last_layers_bf16: true}\n    moe_router_enable"
        )
    )
    (child.parent / "base.yaml").write_text(BASE.replace(", fp8_param: false", ""))
    found = [one.path for one in check(load_run(config_file=child, strict=False)).findings if one.id == "PB134"]
    assert found == [
        "policy.megatron_cfg.fp8_cfg.fp8_param",
        "policy.megatron_cfg.model_overrides.first_last_layers_bf16",
    ]


def test_a_script_is_read_with_its_file_and_its_overrides(child: Path) -> None:
    script = child.parent / "scripts" / "run.sh"
    script.parent.mkdir()
    script.write_text(
        "#!/bin/bash\nset -eou pipefail\nROOT=$(realpath $0)\n"
        "uv run $ROOT/examples/run_grpo.py --config $ROOT/run.yaml policy.precision=float16 "
        "policy.megatron_cfg.fp8_cfg.enabled=false ++policy.new=1 $@ 2>&1 | tee log\n"
    )
    run = load_run(config_file=script, strict=False)
    assert (run.model["fp16"], run.model["bf16"]) == (True, False)
    assert "fp8" not in run.model
    assert [one for one in check(run).findings if one.id == "PB134"] == []
    assert "$@: may hold further overrides, which are not read." in run.reading.uncertainty.open_points


def test_an_override_without_a_key_in_the_configuration_is_refused_as_hydra_does(child: Path) -> None:
    script = child.parent / "run.sh"
    script.write_text("uv run examples/run_grpo.py --config run.yaml policy.megatron_cfg.fp8_cfg.amax=1\n")
    (finding,) = [one for one in check(load_run(config_file=script, strict=False)).findings if one.id == "PB134"]
    assert finding.path == "policy.megatron_cfg.fp8_cfg.amax"
    assert finding.remedy == "Write +policy.megatron_cfg.fp8_cfg.amax=VALUE."


def test_a_file_that_a_script_names_and_that_is_not_there_is_named(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("uv run examples/run_grpo.py --config $CONFIG policy.precision=float16\n")
    with pytest.raises(RunConfigError, match=r"with the file \$CONFIG, which is not found from here"):
        load_run(config_file=script)


def test_a_script_of_the_test_suites_is_read_with_the_recipe_of_its_name(child: Path) -> None:
    root = child.parent / "clone"
    recipe = root / "examples" / "configs" / "recipes" / "llm" / "a.yaml"
    script = root / "tests" / "test_suites" / "llm" / "a.sh"
    for file in (recipe, script):
        file.parent.mkdir(parents=True)
    recipe.write_text(f"defaults: {child}\n")
    command = (
        "CONFIG_PATH=$(echo $SCRIPT_DIR/${EXP_NAME}.yaml | sed 's#tests/test_suites#examples/configs/recipes#')\n"
        "uv run examples/run_grpo.py --config $CONFIG_PATH policy.megatron_cfg.pipeline_model_parallel_size=2\n"
    )
    script.write_text(command)
    reading = load_file_reading(script)
    assert reading.sections["model"]["pipeline_model_parallel_size"] == 2
    script.write_text(f"EXP_NAME=b\n{command}")
    with pytest.raises(UnreadFileError, match="which is not found from here"):
        load_file_reading(script)
