"""The package as a user has it: built from a copy of the sources and unpacked into a folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

__all__ = ["done", "installed_into", "sources"]

ROOT = Path(__file__).parents[1]
PARTS = ("bridge", "recipes", "conf", "setup.py", "pyproject.toml", "README.md", "LICENSE")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
OPTIONS = ("--no-deps", "--no-index")


def done(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]


def sources(folder: Path) -> Path:
    """Copy what a build needs into a folder."""
    folder.mkdir(parents=True)
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, folder)
    return folder


def installed_into(folder: Path, source: Path) -> set[str]:
    """Build the wheel of a project, unpack it into `folder`, and return its top-level packages."""
    wheels = folder.with_name(f"{folder.name}-wheels")
    built = done([*PIP, "wheel", *OPTIONS, "--no-build-isolation", "-w", str(wheels), str(source)])
    assert built.returncode == 0, built.stderr
    (wheel,) = wheels.glob("*.whl")
    put = done([*PIP, "install", *OPTIONS, "--target", str(folder), str(wheel)])
    assert put.returncode == 0, put.stderr
    with zipfile.ZipFile(wheel) as archive:
        return {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" not in name}
