"""The same composition from Python: `bridge.front.loader.load_run`, and Hydra's own compose API."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import hydra
import psutil
import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from bridge.errors import RunConfigError, UnknownRecipeError
from bridge.front import compose
from bridge.front.compose import register_with_hydra
from bridge.front.container import build_container
from bridge.front.loader import load_run
from bridge.front.search import Search
from bridge.precision.mode import format_label
from bridge.precision.statements import get_recipe_name, get_source
from bridge.registry.hydra_group import RecipeSource
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY, Recipe

CONF = Path(__file__).resolve().parents[2] / "conf"


def precision(*overrides: str, config_dir: Path | None = None) -> MixedPrecisionConfig:
    composed = build_container(load_run(["model=gpt_tiny", *overrides], CONF, config_dir=config_dir)).mixed_precision
    assert isinstance(composed, MixedPrecisionConfig)
    return composed


def test_statements_remember_who_made_them() -> None:
    config = precision("mixed_precision=bf16-mixed", "mixed_precision.fp8_margin=2", "mixed_precision.bf16=true")
    assert get_recipe_name(config) == "bf16_mixed"
    assert config.stated == {"bf16", "params_dtype", "pipeline_dtype", "grad_reduce_in_fp32", "fp8_margin"}
    assert get_source(config, "params_dtype") == "recipe bf16_mixed"
    assert get_source(config, "fp8_margin") == "command line"
    assert get_source(config, "bf16") == "command line"


def test_a_file_that_extends_a_recipe_is_named_for_what_it_states_itself(tmp_path: Path) -> None:
    (tmp_path / "mixed_precision").mkdir()
    text = "defaults: [bf16_with_fp8_current_scaling_mixed, _self_]\nfp8_param: false\n"
    (tmp_path / "mixed_precision" / "mine.yaml").write_text(text)
    config = precision("mixed_precision=mine", config_dir=tmp_path)
    assert get_source(config, "fp8") == "recipe bf16_with_fp8_current_scaling_mixed"
    assert get_source(config, "fp8_param") == "mixed_precision/mine.yaml"
    assert (config.fp8_param, config.fp8_param_gather) == (False, False)
    assert get_recipe_name(config) == "mine"
    assert format_label(config) == "mine"


def test_an_override_of_one_of_two_names_of_a_setting_overrides_both() -> None:
    words = ("mixed_precision=bf16_with_fp8_current_scaling_mixed", "mixed_precision.fp8_param=false")
    assert precision(*words).fp8_param_gather is False


def test_a_sweep_and_what_looks_for_its_runs_read_the_clock_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(compose, "_format_launch_time", lambda pattern: f"{pattern}-{next(clock)}")
    _, settings = compose.compose(
        Search(main=str(CONF)), ["mixed_precision=bf16_mixed,fp32"], sweeps=compose.Sweeps.ALLOWED
    )
    assert settings.sweep.dir == "multirun/%Y-%m-%d-0/%H-%M-%S-1"
    assert settings.runtime.output_dir == str(Path(settings.sweep.dir).absolute())


def test_a_program_of_hydra_has_its_own_hydra_back_after_a_run_was_read() -> None:
    with hydra.initialize_config_dir(config_dir=str(CONF / "model"), version_base="1.3"):
        before = GlobalHydra.instance().config_loader()
        assert get_recipe_name(load_run(["mixed_precision=fp32"], CONF).precision) == "fp32"
        assert GlobalHydra.instance().config_loader() is before
        assert hydra.compose("gpt_tiny").hidden_size == 64


def test_a_file_of_the_search_path_is_the_origin_of_what_it_sets(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [gpt_tiny, _self_]\nnum_layers: 2\n")
    run = load_run(["model=mine", f"hydra.searchpath=[file://{tmp_path}]"], CONF)
    assert run.model["num_layers"] == 2
    assert run.origin_of("model.num_layers") == "model/mine.yaml"
    assert run.origin_of("model.hidden_size") == "model/gpt_tiny.yaml"


def test_null_means_no_precision() -> None:
    assert build_container(load_run(["model=gpt_tiny", "mixed_precision=null"], CONF)).mixed_precision is None


def test_a_precision_can_be_stated_without_an_option() -> None:
    config = precision("mixed_precision=null", "mixed_precision.bf16=true")
    assert config.to_dict() == {"bf16": True}


def test_errors_carry_the_nearest_names() -> None:
    with pytest.raises(UnknownRecipeError) as unknown:
        precision("mixed_precision=bf16_mixd")
    assert unknown.value.matches[0] == "bf16_mixed"
    with pytest.raises(RunConfigError) as wrong:
        precision("train.train_itres=5")
    assert wrong.value.matches == ("train_iters",)


def test_hydras_own_compose_api_offers_recipes_in_open_sections() -> None:
    register_with_hydra()
    with hydra.initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        config = hydra.compose("config", overrides=["mixed_precision=fp16-mixed", "mixed_precision.fp8_margin=2"])
    assert config.mixed_precision.fp16 is True
    assert config.mixed_precision.fp8_margin == 2


def test_a_recipe_that_is_registered_again_is_composed_as_it_is_now() -> None:
    register_with_hydra()
    with hydra.initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        for margin in (1, 2):
            REGISTRY.add(Recipe(name="again", function=lambda: MixedPrecisionConfig(bf16=True, fp8_margin=margin)))  # noqa: B023
            try:
                config = hydra.compose("config", overrides=["mixed_precision=again"])
            finally:
                REGISTRY.remove("again")
            assert config.mixed_precision.fp8_margin == margin


def test_processes_of_one_launch_read_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    register_with_hydra()
    monkeypatch.setenv("RANK", "1")
    started = psutil.Process(os.getppid()).create_time()
    expected = datetime.fromtimestamp(started).astimezone().strftime("%H-%M-%S")
    assert OmegaConf.create({"at": "${launched:%H-%M-%S}"}).at == expected


def test_a_config_source_brings_its_recipes_to_the_process_of_a_sweeps_job(tmp_path: Path) -> None:
    recipes = tmp_path / "far_recipes.py"
    recipes.write_text(
        "from bridge.registry.mixed_precision_config import MixedPrecisionConfig\n"
        "from bridge.registry.registry import register\n\n"
        "@register\n"
        "def far() -> MixedPrecisionConfig:\n"
        "    return MixedPrecisionConfig(bf16=True)\n"
    )
    path = tmp_path / "source.pickle"
    path.write_bytes(pickle.dumps(RecipeSource("recipes", f"recipes://{recipes}")))
    REGISTRY.remove("far")
    code = f"import pickle; print(pickle.load(open({str(path)!r}, 'rb')).is_config('mixed_precision/far'))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True\n"


@pytest.mark.parametrize("key", ["target", "precision_schedule"])
def test_null_of_a_key_that_is_no_group_is_its_default(key: str) -> None:
    assert load_run([f"{key}=null"]).sections[key] is None
