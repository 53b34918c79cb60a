"""The wheel as a user installs it: built, put beside the environment, and used from an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("bridge", "recipes", "conf", "pyproject.toml", "README.md", "LICENSE")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")


def done(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the contents of a wheel that was built from a copy of the sources."""
    source, wheels, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "target"))
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, source)
    options = ["--no-deps", "--no-index"]
    built = done([*PIP, "wheel", *options, "--no-build-isolation", "-w", str(wheels), str(source)])
    assert built.returncode == 0, built.stderr
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        folders = {name.partition("/")[0] for name in archive.namelist()}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"bridge", "recipes"}
    put = done([*PIP, "install", *options, "--target", str(target), str(wheel)])
    assert put.returncode == 0, put.stderr
    return target


def command(installed: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `precision-bridge` of the installed copy."""
    code = (
        "import sys, bridge, bridge.cli.main\n"
        f"assert bridge.__file__.startswith({str(installed)!r}), bridge.__file__\n"
        "sys.exit(bridge.cli.main.main())"
    )
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return done([sys.executable, "-c", code, *words], cwd=cwd, env=environment)


def test_an_installed_copy_answers_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    listed = command(installed, tmp_path, "recipes")
    assert "bf16_mixed" in [line.split()[0] for line in listed.stdout.splitlines()]
    checked = command(installed, tmp_path, "check", "mixed_precision=fp8_current", "--target", "h100x8,te2.9,cuda12.9")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert checked.stdout.startswith("bf16_with_fp8_current_scaling_mixed against h100x8,te2.9,cuda12.9\n")
    for words in (("plan", "fp8_current"), ("memory", "bf16_mixed"), ("train", "--cfg", "job", "model=gpt_tiny")):
        answer = command(installed, tmp_path, *words)
        assert (answer.returncode, answer.stderr) == (0, ""), words
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_installed_copy_trains_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    words = ("model=gpt_tiny", "train=smoke", "train.train_iters=3", "logging.tensorboard=false")
    run = command(installed, tmp_path, "train", *words, "train.lr_warmup_iters=0")
    assert run.returncode == 0, run.stderr
    (folder,) = tmp_path.glob("outputs/*/*")
    assert (folder / "summary.json").is_file()
    assert (folder / "train.log").is_file()
