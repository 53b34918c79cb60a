"""Every example of `docs/examples` runs, with the real trainer."""

from __future__ import annotations

import importlib.util
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import releases, warm
from tests.package import installed_into
from tests.plugins import python_path
from tests.read.test_nemo2_plugin import PLUGIN, nemo  # noqa: F401  a fixture
from tests.recipes.test_peer import PEER, peer, wheel  # noqa: F401  fixtures

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
TEAM = EXAMPLES / "team-recipes"
MEGATRON = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--train-iters", "2", "--lr", "1e-3"),
    *("--micro-batch-size", "1", "--seq-length", "32", "--max-position-embeddings", "32"),
    *("--use-distributed-optimizer", "--tokenizer-type", "NullTokenizer", "--vocab-size", "64"),
)


def printed(example: str, *words: str, cwd: Path, path: Path | None = None) -> str:
    """The last line that an example prints."""
    environment = {**os.environ, **({"PYTHONPATH": python_path(path)} if path is not None else {})}
    done = warm.run(["python", "-W", "ignore", str(EXAMPLES / example), *words], cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1].strip()


def test_the_hydra_application_writes_the_chosen_recipe(tmp_path: Path, installed: Path) -> None:
    words = ("mixed_precision=fp8_current", "mixed_precision.num_layers_at_end_in_bf16=2")
    report = warm.run(
        ["python", "-W", "ignore", str(EXAMPLES / "hydra_app/app.py"), *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path(installed)},
    )
    assert report.returncode == 0, report.stderr
    assert "model.fp8: None -> 'hybrid' (set, recipe bf16_with_fp8_current_scaling_mixed: stated)" in report.stdout
    assert "model.num_layers_at_end_in_bf16: 1 -> 2 (set, configuration: stated)" in report.stdout


def test_the_application_with_structured_configs(tmp_path: Path, installed: Path) -> None:
    example = "hydra_app/structured.py"
    assert printed(example, cwd=tmp_path, path=installed).startswith("MixedPrecisionConfig(bf16=True, ")
    chosen = printed(example, "mixed_precision=house_bf16", cwd=tmp_path, path=installed)
    assert chosen == "MixedPrecisionConfig(bf16=True, grad_reduce_in_fp32=False)"
    words = ("mixed_precision=fp8-delayed", "mixed_precision.fp8_margin=1")
    shown = printed(example, *words, cwd=tmp_path, path=installed)
    assert "fp8_recipe='delayed'" in shown
    assert "fp8_margin=1" in shown


def test_the_notebook(tmp_path: Path, installed: Path) -> None:
    assert printed("hydra_app/notebook.py", cwd=tmp_path, path=installed) == "mxfp8 False"


def test_megatron_lms_parser_takes_the_recipe(tmp_path: Path) -> None:
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip(releases.NO_TRAINING)
    words = ("--mixed-precision-recipe", "bf16_with_fp8_current_scaling_mixed", *MEGATRON)
    assert printed("megatron_lm.py", *words, cwd=tmp_path) == "torch.bfloat16 hybrid tensorwise True"


@pytest.mark.skipif(not PEER.exists(), reason="needs Megatron Bridge's file beside the environment: make setup")
def test_megatron_bridge_knows_our_names(peer: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(peer, "MIXED_PRECISION_RECIPES", dict(peer.MIXED_PRECISION_RECIPES))
    found = runpy.run_path(str(EXAMPLES / "megatron_bridge.py"))
    assert {"fp32", "bf16_autocast_mixed"} <= set(found["added"])
    assert found["precision"].fp32


@pytest.mark.skipif(not PLUGIN.exists(), reason="needs NeMo's files beside the environment: make setup")
def test_nemos_plugin_is_made_from_a_recipe(nemo: Any) -> None:  # noqa: F811
    plugin = runpy.run_path(str(EXAMPLES / "nemo_2.py"))["plugin"]
    assert isinstance(plugin, nemo.plugin)
    assert (plugin.dtype_config.fp8_recipe, plugin.dtype_config.num_layers_at_end_in_bf16) == ("tensorwise", 1)


@pytest.mark.parametrize(
    ("example", "library", "recipe", "line"),
    [
        ("transformers_trainer.py", "transformers", "bf16_mixed", "torch.float32 torch.bfloat16"),
        ("transformers_trainer.py", "transformers", "fp32", "torch.float32 torch.float32"),
        ("pytorch_loop.py", "torch", "bf16_mixed", "[]"),
        ("pytorch_loop.py", "torch", "fp32", "[]"),
    ],
)
def test_the_trainer_computes_in_the_recipes_precision(
    example: str, library: str, recipe: str, line: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}: pip install precision-bridge[interop]")
    assert printed(example, recipe, cwd=tmp_path) == line


# -- the template of a team's recipes --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, and the installed package next to it in `site`."""
    folder = tmp_path_factory.mktemp("team")
    shutil.copytree(TEAM, folder / "repository")
    assert installed_into(folder / "site", folder / "repository") == {"acme_recipes"}
    return folder


def ran(team: Path, *words: str) -> Any:
    path = python_path(EXAMPLES.parents[1], team / "site")
    return warm.run(list(words), cwd=team / "repository", env={**os.environ, "PYTHONPATH": path})


def test_every_step_of_the_teams_workflow_passes(team: Path) -> None:
    workflow = yaml.safe_load((team / "repository/.github/workflows/recipes.yml").read_text())
    steps = workflow["jobs"]["recipes"]["steps"]
    commands = [step["run"].split() for step in steps if not step.get("run", "pip").startswith("pip")]
    assert [command[0] for command in commands] == ["pytest", "precision-bridge", "precision-bridge"]
    for program, *words in commands:
        start = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider"] if program == "pytest" else [program]
        done = ran(team, *start, *words)
        assert done.returncode == 0, done.stdout + done.stderr
    upload = next(step["with"]["sarif_file"] for step in steps if "sarif" in step.get("uses", ""))
    assert '"version": "2.1.0"' in (team / "repository" / upload).read_text()


def test_the_teams_plugin_is_listed_and_its_folder_too(team: Path) -> None:
    listed = ran(team, "precision-bridge", "recipes", "--config-dir", "conf")
    names = [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]
    assert {"acme_fp8", "acme_fp8_long", "acme_bf16"} <= set(names)


def test_the_workflow_of_the_team_installs_this_python() -> None:
    workflow = yaml.safe_load((TEAM / ".github/workflows/recipes.yml").read_text())
    setup = next(step for step in workflow["jobs"]["recipes"]["steps"] if "setup-python" in step.get("uses", ""))
    assert sys.version_info >= tuple(map(int, setup["with"]["python-version"].split(".")))
