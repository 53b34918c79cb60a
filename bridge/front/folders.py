"""Functions that find the folder of the Hydra tree, and the file of a run that a path names."""

from __future__ import annotations

import os
from pathlib import Path

import bridge
from bridge.errors import RunConfigError, close_matches, did_you_mean, listed
from bridge.read.run_file import RUN_FILE_NAMES, locate_run_file


def find_config_folder(folder: Path | str | None = None) -> Path:
    """Return the folder of the Hydra tree.

    It is `folder`, or else ``conf`` in the working directory, or else the folder of the package.
    """
    if folder is None:
        if Path("conf/config.yaml").is_file():
            return Path("conf").resolve()
        return find_shipped_folder()
    # os.path.isdir returns False for a path that is too long. Path.is_dir raises an error.
    if os.path.isdir(Path(folder)):  # noqa: PTH112
        return Path(folder).resolve()
    siblings = [path.name for path in Path().iterdir() if path.is_dir()]
    matches = close_matches(str(folder), siblings)
    hint = did_you_mean(matches)
    if not hint:
        hint = "Give the folder that holds config.yaml, or a file with --config."
    raise RunConfigError.of("--config-path", "there is no such folder", str(folder), hint, matches)


def find_path(name: Path | str) -> Path:
    """Return the path of a file or folder, from the working directory or else the repository."""
    path, shipped = Path(name), find_shipped_folder().parent / name
    # os.path.exists returns False for a path that is too long. Path.exists raises an error.
    if not os.path.exists(path) and os.path.exists(shipped):  # noqa: PTH110
        return shipped
    return path


def find_run_file(name: Path | str) -> Path:
    """Return the file that describes a run: the named file, or the file in the named folder."""
    if not str(name).isprintable():
        rule, remedy = "must be a path of printable characters", "Rename the file."
        raise RunConfigError.of("--config", rule, str(name), remedy)
    path = find_path(name)
    if not os.path.isdir(path):  # noqa: PTH112  as in `find_config_folder`
        return path
    file = locate_run_file(path)
    if file == path:
        rule, remedy = f"holds no {listed(RUN_FILE_NAMES)}", "Give the folder of a run, or a file."
        raise RunConfigError.of("--config", rule, str(path), remedy)
    return file


def find_shipped_folder() -> Path:
    """Return the Hydra tree of this package: inside it, or next to it in a checkout."""
    package = Path(str(bridge.__file__)).resolve().parent
    installed = package / "conf"
    if installed.is_dir():
        return installed
    return package.parent / "conf"
