"""Recipes and YAML files as options of `mixed_precision`, shown with ``--cfg job``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.front.command_line import HYDRA_OPTIONS, HYDRA_SWITCHES
from bridge.precision.precision_config import MEGATRON_FIELDS
from bridge.precision.statements import get_field_value
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from tests.sync.test_field_routes import STATED

RECIPES_FILE = '''
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import register

@register(aliases=("house",))
def house_bf16_mixed() -> MixedPrecisionConfig:
    """BF16 with gradients reduced in BF16."""
    return MixedPrecisionConfig(bf16=True, grad_reduce_in_fp32=False)
'''
HOUSE = {"bf16": True, "grad_reduce_in_fp32": False}


@pytest.fixture
def recipes_file(tmp_path: Path) -> Path:
    path = tmp_path / "house_recipes.py"
    path.write_text(RECIPES_FILE)
    return path


@pytest.fixture
def team(tmp_path: Path) -> Path:
    group = tmp_path / "team" / "mixed_precision"
    group.mkdir(parents=True)
    (group / "alone.yaml").write_text("bf16: yes\nfp8: off\nloss_scale: 1e3\n")
    (group / "extended.yaml").write_text(
        "defaults: [bf16_with_fp8_current_scaling_mixed, _self_]\nfp8: e4m3\nnum_layers_at_start_in_bf16: 2\n"
    )
    return group.parent


@pytest.mark.parametrize(
    "spelling",
    [
        "bf16_with_fp8_current_scaling_mixed",
        "bf16-with-fp8-current-scaling-mixed",
        "fp8_current",
        "fp8-current",
    ],
)
def test_an_option_holds_exactly_what_the_recipe_states_in_every_spelling(shown, spelling: str) -> None:
    recipe = REGISTRY.get("bf16_with_fp8_current_scaling_mixed")
    assert shown(f"mixed_precision={spelling}")["mixed_precision"] == recipe.to_dict()


def test_every_field_of_megatrons_own_can_be_overridden(shown) -> None:
    stated = {field: STATED.get(field, True) for field in MEGATRON_FIELDS}
    config = MixedPrecisionConfig.from_dict(stated).to_dict()
    spelt = {name: list(value) if isinstance(value, tuple) else value for name, value in config.items()}
    words = [f"mixed_precision.{name}={'null' if value is None else value}" for name, value in spelt.items()]
    held = shown("mixed_precision=bf16_mixed", *words)
    read = MixedPrecisionConfig.from_dict(held["mixed_precision"])
    assert {name: get_field_value(read, name) for name in MEGATRON_FIELDS} == config
    assert read.bf16


def test_a_value_that_megatron_does_not_take_is_refused_with_its_path(refused) -> None:
    assert "mixed_precision.exp_avg_dtype: must be 'fp32', 'fp16', 'bf16' or 'fp8', got 'fp64'" in refused(
        "mixed_precision.exp_avg_dtype=fp64"
    )


def test_help_lists_every_recipe_once_with_groups_and_examples(train) -> None:
    done = train("--help")
    assert (done.returncode, done.stderr) == (0, "")
    line = next(line for line in done.stdout.splitlines() if line.startswith("mixed_precision: "))
    assert line.removeprefix("mixed_precision: ").split(", ") == sorted(REGISTRY.names())
    for group in ("model", "optimizer", "ddp", "data", "train"):
        assert f"\n{group}: " in done.stdout
    assert done.stdout.count("\npython scripts/train.py ") == 2


def test_a_recipe_of_recipes_from_is_an_option_from_the_command_line(shown, recipes_file: Path) -> None:
    config = shown("mixed_precision=house", f"recipes_from={recipes_file}")
    assert config["mixed_precision"] == HOUSE


def test_recipes_from_takes_a_list(shown, recipes_file: Path) -> None:
    config = shown(
        "mixed_precision=house-bf16-mixed", f"recipes_from=[precision_bridge_recipes.unscaled,{recipes_file}]"
    )
    assert config["mixed_precision"] == HOUSE


def test_recipes_from_in_the_primary_config_is_loaded_before_the_option_is_looked_up(
    shown, recipes_file: Path, tmp_path: Path
) -> None:
    primary = f"defaults: [config, override mixed_precision: house, _self_]\nrecipes_from: {recipes_file}\n"
    (tmp_path / "lab.yaml").write_text(primary)
    config = shown("--config-dir", str(tmp_path), "--config-name", "lab")
    assert config["mixed_precision"] == HOUSE


def test_a_recipe_of_the_environment_variable_is_an_option(shown, recipes_file: Path) -> None:
    assert shown("mixed_precision=house", BRIDGE_RECIPES=str(recipes_file))["mixed_precision"] == HOUSE


def test_recipes_from_that_cannot_be_loaded_is_refused(refused) -> None:
    assert refused("recipes_from=no.such.module", "--cfg", "job") == (
        "recipes_from: there is no module 'no.such.module'. "
        "Give a module that can be imported, or the path of a .py file."
    )


def test_a_yaml_file_is_a_recipe_of_its_own(shown, team: Path) -> None:
    config = shown("--config-dir", str(team), "mixed_precision=alone", "mixed_precision.fp8_margin=2")
    assert config["mixed_precision"] == {"bf16": True, "fp8": False, "loss_scale": 1000.0, "fp8_margin": 2}


def test_a_yaml_file_extends_a_recipe_through_its_defaults_list(shown, team: Path) -> None:
    base = REGISTRY.get("bf16_with_fp8_current_scaling_mixed").to_dict()
    config = shown("--config-dir", str(team), "mixed_precision=extended")
    assert config["mixed_precision"] == {**base, "fp8": "e4m3", "num_layers_at_start_in_bf16": 2}


def test_a_yaml_file_is_listed_among_the_options(train, team: Path) -> None:
    lines = train("--config-dir", str(team), "--help").stdout.splitlines()
    options = next(line for line in lines if line.startswith("mixed_precision: ")).split(", ")
    assert {"alone", "extended", "bf16_mixed"} <= {option.removeprefix("mixed_precision: ") for option in options}


def test_a_yaml_file_with_the_name_of_a_recipe_is_refused_since_one_of_them_would_be_ignored(
    refused, team: Path
) -> None:
    (team / "mixed_precision" / "bf16_mixed.yaml").write_text("bf16: true\n")
    assert refused("--config-dir", str(team), "--cfg", "job") == (
        "mixed_precision/bf16_mixed: is both a registered recipe and a YAML file, got "
        f"file://{team}/mixed_precision/bf16_mixed.yaml. "
        "Rename the file; its defaults list can name the recipe to build on."
    )


def test_a_field_the_recipe_does_not_state_is_set_without_a_plus_sign(shown) -> None:
    config = shown("mixed_precision=bf16_mixed", "mixed_precision.fp8_margin=2")
    assert config["mixed_precision"] == {**REGISTRY.get("bf16_mixed").to_dict(), "fp8_margin": 2}


def test_a_tilde_takes_a_statement_back(shown) -> None:
    stated = REGISTRY.get("bf16_mixed").to_dict()
    del stated["pipeline_dtype"]
    assert shown("~mixed_precision.pipeline_dtype")["mixed_precision"] == stated


def test_null_leaves_the_group_out(shown) -> None:
    assert shown("mixed_precision=null")["mixed_precision"] == {}


def test_the_config_is_found_from_any_folder_and_without_torch_or_megatron(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "train.py"
    for flags in (["--cfg", "job"], ["--help"]):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", str(script), *flags],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "bridge.front.compose" in imported
        assert not {name for name in imported if name.split(".")[0] in ("torch", "megatron", "numpy")}
    assert list(tmp_path.iterdir()) == []


def test_every_flag_of_hydra_is_taken(train) -> None:
    done = train("--hydra-help")
    listed = re.findall(r"^(--\S+) : ", done.stdout, re.MULTILINE)
    ours = [",".join(spellings) for spellings in (*HYDRA_SWITCHES, *HYDRA_OPTIONS, ("--cfg", "-c"), ("--info", "-i"))]
    assert sorted(",".join(flag.split(",")) for flag in listed) == sorted(ours)


def test_flags_that_exclude_each_other_are_refused_with_the_rule(refused) -> None:
    assert refused("--cfg", "job", "--multirun") == (
        "Only one of --run, --multirun, --cfg, --info and --shell_completion can be specified."
    )


def test_flags_may_stand_anywhere(shown, team: Path) -> None:
    before = shown("--config-dir", str(team), "train.seed=7", "mixed_precision=alone")
    assert shown("train.seed=7", "--config-dir", str(team), "mixed_precision=alone") == before


def test_a_config_path_is_read_from_here_and_else_from_beside_the_script(train, tmp_path: Path) -> None:
    (tmp_path / "here.yaml").write_text("train: {seed: 7}\n")
    shown = train("--cfg", "job", "--config-path", ".", "--config-name", "here")
    assert (shown.returncode, shown.stdout) == (0, "train:\n  seed: 7\n")
    assert train("--cfg", "job", "--config-path", "../conf").stdout.startswith("recipes_from: null\n")
    missing = train("--cfg", "job", "--config-path", "nowhere")
    assert missing.stderr.startswith("--config-path: there is no such folder, got 'nowhere'.")


def test_the_config_of_an_earlier_run_can_be_shown_again(shown, train, tmp_path: Path) -> None:
    shown_first = train("--cfg", "job", "mixed_precision=fp16_mixed", "mixed_precision.hysteresis=4").stdout
    (tmp_path / "config.yaml").write_text(shown_first)
    assert train("--cfg", "job", "--config-path", str(tmp_path)).stdout == shown_first
