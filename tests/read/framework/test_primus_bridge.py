"""Experiments of Primus on Megatron Bridge: the function of a recipe, followed with the keys of the files."""

from pathlib import Path

import pytest

from bridge.errors import RunConfigError
from bridge.front.loader import load_run
from bridge.preflight.rule_check import check
from bridge.preflight.run import Run
from bridge.preflight.run_choice import RunChoice

EXPERIMENT = """
work_group: amd
modules:
  pre_trainer:
    framework: megatron_bridge
    config: pretrain_trainer.yaml
    model: tiny.yaml
    overrides:
      micro_batch_size: 2
"""
PROVIDER = """
from dataclasses import dataclass

@dataclass
class TinyProvider:
    num_layers: int = 2
    hidden_size: int = 256
    num_attention_heads: int = 4
    vocab_size: int = 1024
    seq_length: int = 128
    tensor_model_parallel_size: int = 1
    recompute_granularity: str | None = None
    bf16: bool = True
"""
RECIPE = """
from megatron.bridge.models.tiny_provider import TinyProvider
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.config import ConfigContainer, TrainingConfig
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

def tiny_pretrain_config(**user_kwargs) -> ConfigContainer:
    peft = user_kwargs.pop("peft", None)
    kwargs = {**{"tensor_model_parallel_size": 2}, **user_kwargs}
    cfg = _tiny_common(**kwargs)
    if peft == "lora":
        cfg.peft = LoRA(dim=8)
    return cfg

def fixed_pretrain_config(**user_kwargs) -> ConfigContainer:
    cfg = _tiny_common(seq_length=64, **user_kwargs)
    cfg.model.tensor_model_parallel_size = 4
    return cfg

def _tiny_common(
    tensor_model_parallel_size: int = 1,
    micro_batch_size: int = 1,
    seq_length: int = 128,
    precision_config: str = "bf16_mixed",
    mixed: str | None = None,
) -> ConfigContainer:
    return ConfigContainer(
        model=TinyProvider(tensor_model_parallel_size=tensor_model_parallel_size, seq_length=seq_length),
        train=TrainingConfig(micro_batch_size=micro_batch_size),
        optimizer=OptimizerConfig(optimizer="adam", use_distributed_optimizer=True, bf16=True),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False),
        mixed_precision=precision_config,
    )
"""
PRIMUS_RECIPE = """
from dataclasses import dataclass
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.recipes.tiny import _tiny_common
from megatron.bridge.recipes.utils.optimizer_utils import distributed_fused_adam_with_cosine_annealing
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.mixed_precision import bf16_mixed, register

@register
def house_mixed():
    cfg = bf16_mixed()
    cfg.fp4 = "e2m1"
    cfg.fp4_recipe = "mxfp4"
    return cfg

def registered_pretrain_config(**user_kwargs):
    return _tiny_common(precision_config="house_mixed", **user_kwargs)

def house_pretrain_config(**user_kwargs):
    return _tiny_common(precision_config="bf16_with_mxfp8_mixed", **user_kwargs)

@dataclass
class HouseProvider(GPTModelProvider):
    num_layers: int = 2

def unread_pretrain_config(**user_kwargs):
    optimizer, scheduler = distributed_fused_adam_with_cosine_annealing(max_lr=1e-4)
    return ConfigContainer(
        model=HouseProvider(), optimizer=optimizer, scheduler=scheduler, mixed_precision="bf16_mixed"
    )
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def experiment(
    tmp_path: Path,
    *overrides: str,
    recipe: str = "tiny",
    flavor: str = "tiny_pretrain_config",
    tail: str = "",
    has_source: bool = True,
    model: str = "",
) -> Path:
    """Return an experiment in a clone of Primus, with or without its submodule Megatron Bridge."""
    configs = tmp_path / "primus" / "configs"
    write(configs / "modules" / "megatron_bridge" / "pretrain_trainer.yaml", "stage: pretrain\nuse_turbo_gemm: false\n")
    write(configs / "models" / "megatron_bridge" / "tiny.yaml", f"recipe: {recipe}\nflavor: {flavor}\n{model}")
    recipes = tmp_path / "primus" / "backends" / "megatron_bridge" / "recipes"
    write(recipes / "house.py", PRIMUS_RECIPE)
    if has_source:
        package = tmp_path / "third_party" / "Megatron-Bridge" / "src" / "megatron" / "bridge"
        write(package / "recipes" / "tiny.py", RECIPE)
        write(package / "models" / "tiny_provider.py", PROVIDER)
    path = tmp_path / "exp.yaml"
    path.write_text(EXPERIMENT + "".join(f"      {line}\n" for line in overrides) + tail)
    return path


def load(path: Path, **variables: str) -> Run:
    return load_run(config_file=path, choice=RunChoice(variables=variables), strict=False)


def test_keys_of_the_files_are_arguments_of_the_recipe(tmp_path: Path) -> None:
    run = load(experiment(tmp_path, "tensor_model_parallel_size: 1"))
    assert run.reading.framework == "Primus on Megatron Bridge"
    assert run.model["tensor_model_parallel_size"] == 1
    assert run.section("train")["micro_batch_size"] == 2
    assert run.reading.sections["mixed_precision"] == "bf16_mixed"
    assert run.origin_of("model.seq_length").startswith("recipes/tiny.py")
    assert run.plan.layers
    assert any("third_party/Megatron-Bridge" in note for note in run.reading.notes)
    assert str(run.reading.release.version) == "0.16.1"


def test_the_recipe_decides_what_no_key_states(tmp_path: Path) -> None:
    assert load(experiment(tmp_path)).model["tensor_model_parallel_size"] == 2


def test_a_variable_is_an_argument_too(tmp_path: Path) -> None:
    path = experiment(tmp_path, "seq_length: ${PRIMUS_SEQ_LENGTH:256}", "precision_config: ${PRECISION:null}")
    assert load(path).model["seq_length"] == 256
    assert load(path, PRIMUS_SEQ_LENGTH="512").model["seq_length"] == 512


def test_adapters_are_those_that_the_recipe_makes(tmp_path: Path) -> None:
    assert load(experiment(tmp_path)).sections.get("peft") is None
    run = load(experiment(tmp_path, "peft: lora"))
    assert run.sections["peft"]["dim"] == 8
    assert run.plan.adapter is not None


def test_a_key_that_the_recipe_does_not_take_is_reported(tmp_path: Path) -> None:
    run = load(experiment(tmp_path, "recompute_granularity: full", "stderr_sink_level: DEBUG"))
    assert run.model.get("recompute_granularity") is None
    (dropped,) = run.reading.option_faults.dropped_fields
    assert (dropped.path, dropped.value) == ("model.recompute_granularity", "full")
    assert "tiny_pretrain_config does not take this argument" in dropped.because
    assert [one.path for one in check(run).findings if one.id == "PB801"] == ["model.recompute_granularity"]


def test_a_key_over_which_the_recipe_writes_is_reported(tmp_path: Path) -> None:
    run = load(experiment(tmp_path, "tensor_model_parallel_size: 1", flavor="fixed_pretrain_config"))
    assert run.model["tensor_model_parallel_size"] == 4
    (dropped,) = run.reading.option_faults.dropped_fields
    assert dropped.because.endswith("sets another value itself")


def test_an_argument_that_the_recipe_passes_on_twice_stops_the_run(tmp_path: Path) -> None:
    run = load(experiment(tmp_path, flavor="fixed_pretrain_config", model="seq_length: 32\n"))
    (error,) = [one for one in check(run).findings if one.severity == "error"]
    assert error.path == "seq_length"
    assert "stops at the start with a TypeError" in error.rule


def test_a_section_next_to_modules_reaches_nothing(tmp_path: Path) -> None:
    run = load(experiment(tmp_path, "peft: lora", tail="peft:\n    dim: 32\n"))
    assert run.sections["peft"]["dim"] == 8
    (dropped,) = run.reading.option_faults.dropped_fields
    assert (dropped.path, dropped.value) == ("peft.dim", 32)
    assert "outside of `modules`" in dropped.because


def test_a_section_among_the_keys_is_written_over_that_of_the_recipe(tmp_path: Path) -> None:
    lines = ("ddp: {overlap_grad_reduce: true, use_distributed_optimizer: 'no', average_in_collective: true}",)
    run = load(experiment(tmp_path, *lines))
    assert run.section("ddp")["overlap_grad_reduce"] is True
    assert run.section("ddp")["use_distributed_optimizer"] is True  # a text is not written over a truth value


def test_a_recipe_of_primus_counts_before_one_of_megatron_bridge(tmp_path: Path) -> None:
    run = load(experiment(tmp_path, recipe="house", flavor="house_pretrain_config"))
    assert run.reading.sections["mixed_precision"] == "bf16_with_mxfp8_mixed"


def test_a_precision_that_the_recipes_module_registers_is_followed(tmp_path: Path) -> None:
    run = load(experiment(tmp_path, recipe="house", flavor="registered_pretrain_config"))
    precision = run.reading.sections["mixed_precision"]
    assert (precision["bf16"], precision["fp4"], precision["fp4_recipe"]) == (True, "e2m1", "mxfp4")
    assert not [one for one in check(run).findings if one.id == "PB202"]


def test_without_the_source_every_setting_is_the_recipes(tmp_path: Path) -> None:
    run = load(experiment(tmp_path, "precision_config: bf16_mixed", has_source=False))
    assert run.reading.uncertainty.mode_decider == "the recipe tiny.tiny_pretrain_config, which is not at hand,"
    assert any("found in none of them" in one for one in run.reading.uncertainty.open_points)
    assert any("precision_config=bf16_mixed" in one for one in run.reading.uncertainty.open_points)
    with pytest.raises(RunConfigError, match=r"the recipe tiny\.tiny_pretrain_config, which is not at hand"):
        load_run(config_file=tmp_path / "exp.yaml")


def test_outside_of_a_clone_the_recipe_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").write_text(EXPERIMENT)
    run = load(tmp_path / "exp.yaml")
    assert any(one.startswith("tiny.yaml: not there") for one in run.reading.uncertainty.open_points)
    assert any(one.startswith("The recipe is not known") for one in run.reading.uncertainty.open_points)


def test_linear_layers_of_primus_turbo_are_not_planned(tmp_path: Path) -> None:
    path = experiment(tmp_path, "enable_primus_turbo: true", "use_turbo_gemm: true")
    assert load(path).reading.uncertainty.no_plan_reason.startswith("use_turbo_gemm: linear layers are Primus-Turbo's")


def test_a_number_of_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunConfigError, match="--launch"):
        load_run(config_file=experiment(tmp_path), choice=RunChoice(number=2))


def test_no_switch_of_an_optimizer_is_replaced_whose_source_is_not_read(tmp_path: Path) -> None:
    run = load(experiment(tmp_path, recipe="house", flavor="unread_pretrain_config", has_source=False))
    assert run.prediction.precision.bf16
    assert not run.is_value_before_sync_known("optimizer.bf16")
    assert [finding for finding in check(run).findings if finding.id == "PB123"] == []
