"""The base install answers without the packages of the extras, and a command that needs one names its extra."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bridge.cli.main import main
from bridge.errors import MissingExtraError
from bridge.extras import EXTRAS, require_extra

ROOT = Path(__file__).parents[1]
OPTIONAL = tuple(name for modules in EXTRAS.values() for name in modules)
SCRIPT = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --bf16\n"
RUN = "mixed_precision: bf16_mixed\nmodel: {num_layers: 4, hidden_size: 512, num_attention_heads: 8}\n"


@pytest.fixture
def base_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which no package of an extra can be imported."""
    for name in OPTIONAL:
        monkeypatch.setitem(sys.modules, name, None)


def test_the_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        packages = [re.split(r"[<>=]", line)[0] for line in extras[extra]]
        assert packages == [name.replace("_", "-") for name in modules]
    base = {re.split(r"[<>=]", line)[0].replace("-", "_").lower() for line in project["dependencies"]}
    assert base.isdisjoint(OPTIONAL)
    assert "precision-bridge[train,scripts]" in extras["dev"]


@pytest.mark.usefixtures("base_install")
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("train", "hydra.run.dir=run"), "A training run"),
        (("compare", "mixed_precision=bf16_mixed,fp32", "hydra.sweep.dir=runs"), "A training run"),
        (("train", "--multirun", "mixed_precision=bf16_mixed,fp32", "hydra.sweep.dir=runs"), "A training run"),
        (("compare", "--gradients", "bf16_mixed", "fp8_current"), "precision-bridge compare --gradients"),
        (("quantisation-error", "mxfp8"), "precision-bridge quantisation-error"),
        (("rehearse", "--config", "run.yaml"), "precision-bridge rehearse"),
        (("report", "run"), "precision-bridge report"),
        (("plan", "--config", "run.yaml", "--picture", "plan.png"), "precision-bridge plan --picture"),
    ],
)
def test_a_command_that_needs_the_extra_for_training_names_it(
    words: tuple[str, ...], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys({OPTIONAL!r}))\n"
        f"from bridge.cli.main import main\nsys.exit(main({list(words)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stderr, done.returncode) == (
        f"{what} needs packages that are not installed (einops, jinja2, matplotlib, psutil, scipy, tensorboard): "
        "`pip install 'precision-bridge[train]'`.\n",
        2,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"], "nothing was begun"


@pytest.mark.usefixtures("base_install")
def test_a_launch_script_names_the_extra_for_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    path = tmp_path / "run.sh"
    for words in (["check", "--config", str(path)], ["convert", str(path)], ["check", "--brief", str(tmp_path)]):
        assert main(words) == 2
        assert capsys.readouterr().err == (
            f"{path}: reading a launch script needs packages that are not installed (tree-sitter, tree-sitter-bash): "
            "`pip install 'precision-bridge[scripts]'`.\n"
        )


def test_only_the_absent_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require_extra("train", "A run")
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(MissingExtraError) as caught:
        require_extra("train", "A run")
    assert (caught.value.extra, caught.value.missing) == ("train", ("scipy",))


def test_the_base_install_checks_plans_and_synchronises(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    commands = [
        ["recipes"],
        ["check", "mixed_precision=fp8_current", "--target", "h100x8,te2.9,cuda12.9"],
        ["check", "--config", "run.yaml", "--target", "h100x8,te2.9,cuda12.9"],
        ["plan", "fp8_current"],
        ["memory", "--config", "run.yaml", "--target", "h100x8"],
        ["explain", "fp8_param_gather", "mxfp8"],
        ["train", "--cfg", "job"],
    ]
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys({OPTIONAL!r}))\n"
        "from types import SimpleNamespace\nfrom bridge import synchronize\nfrom bridge.cli.main import main\n"
        "model = SimpleNamespace(bf16=False, fp16=True, params_dtype=None)\n"
        "synchronize('bf16_mixed', model=model)\nassert (model.bf16, model.fp16) == (True, False)\n"
        f"for words in {commands!r}:\n    assert not main(words), words\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.stderr, done.returncode) == ("", 0)
