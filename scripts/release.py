"""Build a release from the last commit, check its contents, and use it in a fresh environment.

    python scripts/release.py torch==2.13.0

Writes the source distribution and the wheel, which is built from it, to `dist`. The wheel must hold each file of the
packages and no other. It is installed into a fresh environment, behind the named torch: `check` and `plan` answer in
the base install, and README's commands run with the extra `train`, shortened. Both happen in an empty folder, and in
one with a folder `recipes` of the user's own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
PLACES = (
    ("bridge/front/plugins/", ""),
    ("bridge/", "bridge/"),
    ("conf/", "bridge/conf/"),
    ("recipes/", "precision_bridge_recipes/"),
)
"""Beginning of a path of the repository -> of its path in the wheel."""
SHORT = ("model=gpt_tiny", "train=smoke", "train.train_iters=2", "train.lr_warmup_iters=0", "logging.tensorboard=false")
FP16 = ("mixed_precision.initial_loss_scale=1024",)
"""A run whose loss scale is still falling from 2**32 after two steps has learned nothing, and its exit code is 1."""


def main() -> None:
    """Build the distributions, compare their contents with the commit, and run the installed commands."""
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        tracked = unpacked(place / "source")
        run(sys.executable, "-m", "build", "--outdir", DIST, place / "source")
        (wheel,), (source,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
        require_contents(wheel, source, tracked)
        venv.create(place / "fresh", with_pip=True)
        pip = (place / "fresh" / "bin" / "python", "-m", "pip", "install", "-q")
        command = place / "fresh" / "bin" / "precision-bridge"
        for wanted in (sys.argv[1], wheel):
            run(*pip, wanted)
        answer(command, place)
        run(*pip, f"{wheel}[train]")
        for folder in (place / "empty", place / "with-recipes"):
            folder.mkdir()
            if folder.name == "with-recipes":
                (folder / "recipes").mkdir()
                (folder / "recipes" / "__init__.py").write_text("raise ImportError\n")
            answer(command, folder)
            use(command, folder)
    sys.stdout.write(f"{wheel.relative_to(ROOT)} and {source.relative_to(ROOT)} are ready.\n")


def run(*words: str | Path, cwd: Path = ROOT) -> str:
    """Run a command and return what it prints; exit with its output where it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(word) for word in words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def unpacked(folder: Path) -> list[str]:
    """Unpack the files of the last commit into a folder, and return their paths."""
    archive = folder.with_suffix(".tar")
    run("git", "archive", "--output", archive, "HEAD")
    with tarfile.open(archive) as members:
        members.extractall(folder, filter="data")
        return [member.name for member in members if not member.isdir()]


def require_contents(wheel: Path, source: Path, tracked: list[str]) -> None:
    """Exit where the wheel lacks a file of the packages or holds another one, or the source distribution lacks one."""
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(source) as archive:
        in_source = {name.partition("/")[2] for name in archive.getnames()}
    wanted: set[str] = set()
    for tracked_path in tracked:
        path = path_in_wheel(tracked_path)
        if path is not None:
            wanted.add(path)
    faults: dict[str, set[str]] = {
        "missing from the wheel": wanted - in_wheel,
        "in the wheel, and of no package": in_wheel - wanted,
        "missing from the source distribution": {"pyproject.toml", "README.md", "LICENSE"} - in_source,
    }
    lines = []
    for fault, names in faults.items():
        if names:
            lines.append(f"{fault}: {', '.join(sorted(names))}")
    if lines:
        sys.exit("\n".join(lines))


def path_in_wheel(path: str) -> str | None:
    """Return the path in the wheel of a file of the repository, None for a file that is in no package."""
    for in_repository, in_wheel in PLACES:
        if path.startswith(in_repository):
            return in_wheel + path.removeprefix(in_repository)
    return None


def answer(command: Path, folder: Path) -> None:
    """Run commands of the base install in a folder, and exit where an answer is wrong."""
    listed = run(command, "recipes", cwd=folder)
    if "bf16_mixed" not in listed:
        sys.exit(f"recipes: bf16_mixed must be listed, got\n{listed}")
    run(command, "check", "mixed_precision=fp8_current", "--target", "h100x8,te2.9,cuda12.9", cwd=folder)
    run(command, "plan", "fp8_current", cwd=folder)


def use(command: Path, folder: Path) -> None:
    """Run README's commands, shortened, in a folder of a fresh environment with the extra `train`."""
    examples = re.findall(r"^python scripts/train\.py (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    for words in examples:
        overrides = [*words.split(), *SHORT]
        if "fp16" in words:
            overrides += FP16
        run(command, "train", *overrides, cwd=folder)
        sys.stdout.write(f"{folder.name}: precision-bridge train {words}\n")


if __name__ == "__main__":
    main()
