"""Applications of other people: `mixed_precision=NAME` is a group in them, and nothing else of them changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.plugins import python_path

APP = """\
import sys

import hydra
from omegaconf import OmegaConf

from bridge import to_config
from bridge.precision.mode import format_label
from bridge.registry.hydra_group import register_group

register_group()


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    node = cfg.get("mixed_precision")
    print(format_label(to_config(node)) if OmegaConf.is_config(node) else f"key {node}")


main()
"""


REGISTERED = "from bridge.registry.hydra_group import register_group\n\nregister_group()\n"
IMPORTS = f"from bridge import to_config\nfrom bridge.precision.mode import format_label\n{REGISTERED}"


class Application:
    """A Hydra application in a folder, with the wheel in front of the environment."""

    def __init__(self, folder: Path, installed: Path) -> None:
        self.folder, self.installed = folder, installed
        self.write("app.py", APP)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def environment(self, *folders: Path) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": python_path(self.installed, *folders)}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return warm.run(["python", "app.py", *words], cwd=self.folder, env=self.environment())

    def prints(self, *words: str) -> str:
        done = self.run(*words)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.strip()


@pytest.fixture
def app(tmp_path: Path, installed: Path) -> Application:
    made = Application(tmp_path, installed)
    made.write("conf/config.yaml", "defaults:\n  - mixed_precision: bf16_mixed\n  - _self_\n")
    return made


def test_a_recipe_is_an_option_and_every_field_can_be_overridden(app: Application) -> None:
    assert app.prints() == "bf16_mixed"
    assert app.prints("mixed_precision=fp8-current", "mixed_precision.fp8_margin=2") == (
        "bf16_with_fp8_current_scaling_mixed, fp8_margin=2"
    )
    refused = app.run("mixed_precision.fp8_margn=2")
    assert "mixed_precision.fp8_margn: no such field. Did you mean 'fp8_margin'" in refused.stderr


def test_a_switch_that_needs_another_one_follows_it_as_in_our_own_script(app: Application) -> None:
    words = ("mixed_precision=bf16_with_mxfp8_mixed", "mixed_precision.fp8_param_gather=false")
    assert app.prints(*words) == (
        "bf16_with_mxfp8_mixed, fp8_param_gather=False, reuse_grad_buf_for_mxfp8_param_ag=False"
    )


def test_a_misspelt_recipe_is_answered_with_the_options(app: Application) -> None:
    done = app.run("mixed_precision=bf17_mixed")
    assert done.returncode == 1
    assert "Could not find 'mixed_precision/bf17_mixed'" in done.stderr
    assert "\tbf16_with_nvfp4_mixed\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_yaml_file_of_the_application_builds_on_a_recipe(app: Application) -> None:
    app.write("conf/mixed_precision/house.yaml", "defaults: [fp8_current, _self_]\nfp8_margin: 2\n")
    assert app.prints("mixed_precision=house") == "bf16_with_fp8_current_scaling_mixed, fp8_margin=2"


def test_files_and_nodes_of_the_application_come_before_recipes_of_their_name(app: Application) -> None:
    app.write("conf/mixed_precision/bf16_mixed.yaml", "fp16: true\n")
    assert app.prints() == "fp16=True"
    store = (
        "from hydra.core.config_store import ConfigStore\n"
        "ConfigStore.instance().store(group='mixed_precision', name='fp16_mixed', node={'fp32': True})\n"
    )
    app.write("app.py", store + APP)
    assert app.prints("mixed_precision=fp16_mixed") == "fp32=True"


def test_a_key_of_that_name_stays_a_key_without_the_group(app: Application) -> None:
    app.write("conf/config.yaml", "mixed_precision: bf16\n")
    app.write("app.py", APP.replace(REGISTERED, ""))
    assert app.prints("mixed_precision=fp16") == "key fp16"


def test_an_application_without_the_group_is_as_it_was(app: Application) -> None:
    app.write("conf/config.yaml", "lr: 1\n")
    assert "mixed_precision" not in app.prints("--help")
    app.write("app.py", APP.replace(IMPORTS, "").replace("format_label(to_config(node))", "node"))
    code = app.folder / "app.py"
    code.write_text(code.read_text() + "print([name for name in ('recipes', 'torch', 'numpy') if name in sys.modules])")
    words = [sys.executable, "app.py"]
    done = subprocess.run(words, cwd=app.folder, env=app.environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "key None\n[]\n")


def test_two_nodes_have_a_recipe_each(app: Application) -> None:
    app.write("conf/config.yaml", "defaults:\n  - mixed_precision@teacher: bf16_mixed\n  - mixed_precision: fp32\n")
    app.write("app.py", APP.replace("    print(", "    print(format_label(to_config(cfg.teacher)), "))
    assert app.prints("mixed_precision@teacher=fp8_current") == "bf16_with_fp8_current_scaling_mixed fp32"


def test_the_group_can_be_added_on_the_command_line(app: Application) -> None:
    app.write("conf/config.yaml", "lr: 1\n")
    assert app.prints("+mixed_precision=bf16_mixed") == "bf16_mixed"


def test_a_broken_plugin_of_recipes_is_one_sentence_and_the_others_load(app: Application, tmp_path: Path) -> None:
    plugin = tmp_path / "site"
    information = plugin / "acme-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[bridge.recipes]\nacme = acme_broken\n")
    (plugin / "acme_broken.py").write_text("import a_package_that_is_not_there\n")
    done = subprocess.run(
        [sys.executable, "app.py"],
        cwd=app.folder,
        env=app.environment(plugin),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "bf16_mixed\n"
    assert done.stderr == (
        "Recipes not loaded: plugin 'acme' (acme_broken): "
        "ModuleNotFoundError: No module named 'a_package_that_is_not_there'\n"
    )


def test_the_group_takes_recipes_of_a_file(app: Application) -> None:
    app.write(
        "team.py",
        "from bridge import MixedPrecisionConfig, register\n\n"
        "@register\n"
        "def team_fp16():\n"
        "    return MixedPrecisionConfig(fp16=True)\n",
    )
    app.write("app.py", APP.replace("register_group()", "register_group('team.py')"))
    assert app.prints("mixed_precision=team_fp16") == "team_fp16"


def test_a_sweep_composes_a_recipe_per_job(app: Application) -> None:
    done = app.run("--multirun", "mixed_precision=bf16_mixed,fp8_current", "hydra/job_logging=disabled")
    assert [line for line in done.stdout.splitlines() if not line.startswith("[")] == [
        "bf16_mixed",
        "bf16_with_fp8_current_scaling_mixed",
    ]


def test_a_sweep_in_other_processes_composes_a_recipe_per_job(app: Application) -> None:
    reason = "needs hydra-joblib-launcher: the extra [dev]"
    launcher = pytest.importorskip("hydra_plugins.hydra_joblib_launcher.joblib_launcher", reason=reason)
    words = ["app.py", "--multirun", "hydra/launcher=joblib", "mixed_precision=bf16_mixed,fp8_current"]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=app.folder,
        env=app.environment(Path(launcher.__file__).parents[2]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {"bf16_mixed", "bf16_with_fp8_current_scaling_mixed"} <= set(done.stdout.splitlines())
