"""The wheel as a user installs it: built, put beside the environment, and used from an empty folder."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.package import done, sources
from tests.plugins import python_path


def command(installed: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `precision-bridge` of the installed copy."""
    code = (
        "import sys, bridge, bridge.cli.main\n"
        f"assert bridge.__file__.startswith({str(installed)!r}), bridge.__file__\n"
        "sys.exit(bridge.cli.main.main())"
    )
    environment = {**os.environ, "PYTHONPATH": python_path(installed)}
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


def test_a_folder_called_recipes_hides_no_built_in_recipe(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").write_text("")
    listed = command(installed, tmp_path, "recipes")
    assert "bf16_mixed" in [line.split()[0] for line in listed.stdout.splitlines()]


def test_neither_the_checkout_nor_what_is_built_from_it_has_a_symbolic_link(tmp_path: Path) -> None:
    source = sources(tmp_path / "source")
    assert [path for path in source.rglob("*") if path.is_symlink()] == []
    for function in ("build_sdist", "build_wheel"):
        build = f"import sys; from setuptools.build_meta import {function}; {function}(sys.argv[1])"
        built = done([sys.executable, "-c", build, str(tmp_path)], cwd=source)
        assert built.returncode == 0, built.stderr
    (wheel,), (archive,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as opened:
        assert [one.filename for one in opened.infolist() if stat.S_ISLNK(one.external_attr >> 16)] == []
        names = set(opened.namelist())
    with tarfile.open(archive) as opened:
        assert [one.name for one in opened if not (one.isreg() or one.isdir())] == []
        in_archive = {one.name.partition("/")[2] for one in opened if one.isreg()}
    for room, place in (("bridge", "bridge"), ("recipes", "precision_bridge_recipes"), ("conf", "bridge/conf")):
        files = [path.relative_to(source / room).as_posix() for path in (source / room).rglob("*") if path.is_file()]
        wanted = {name for name in files if not name.startswith("front/plugins/")}
        assert {f"{place}/{name}" for name in wanted} <= names
        assert {f"{room}/{name}" for name in wanted} <= in_archive


@pytest.mark.slow
def test_an_installed_copy_trains_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    words = ("model=gpt_tiny", "train=smoke", "train.train_iters=3", "logging.tensorboard=false")
    run = command(installed, tmp_path, "train", *words, "train.lr_warmup_iters=0")
    assert run.returncode == 0, run.stderr
    (folder,) = tmp_path.glob("outputs/*/*")
    assert (folder / "summary.json").is_file()
    assert (folder / "train.log").is_file()


def test_an_editable_install_has_hydras_plugin_too(tmp_path: Path) -> None:
    source, wheel = sources(tmp_path / "source"), tmp_path / "editable"
    build = "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"
    built = done([sys.executable, "-c", build, str(wheel)], cwd=source)
    assert built.returncode == 0, built.stderr
    (archive,) = wheel.glob("*.whl")
    unpacked = done([sys.executable, "-m", "zipfile", "-e", str(archive), str(wheel)])
    assert unpacked.returncode == 0, unpacked.stderr
    other = tmp_path / "other" / "hydra_plugins"
    other.mkdir(parents=True)
    (other / "of_another_package.py").write_text("")
    code = (
        "import site, sys\n"
        f"sys.path[:0] = [{str(wheel)!r}, {str(other.parent)!r}]\n"
        f"sys.path += {[path for path in sys.path if path.endswith('site-packages')]!r}\n"
        f"site.addsitedir({str(wheel)!r})\n"
        "import bridge, hydra_plugins.of_another_package\n"
        f"assert bridge.__file__.startswith({str(source)!r}), bridge.__file__\n"
        "from hydra.core.plugins import Plugins\n"
        "from hydra.plugins.config_source import ConfigSource\n"
        "print([found.__name__ for found in Plugins.instance().discover(ConfigSource)])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = done([sys.executable, "-S", "-c", code], cwd=tmp_path, env=environment)
    assert (found.returncode, found.stderr) == (0, "")
    assert "RecipeSource" in found.stdout
