"""`read_file_runs`: the runs of several files and folders, and the files without a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import BridgeError, MissingExtraError, RunConfigError, UnreadFileError
from bridge.front.folders import find_path
from bridge.preflight.run import Run
from bridge.read.run_file import locate_run_file

RUN_FILE_SUFFIXES = (".yaml", ".yml", ".sh", ".bash", ".slurm", ".sbatch", ".sub", ".slrm")
"""Ends of the files in a folder that may describe a run. Other files are read only if they are named."""


@dataclass(frozen=True, kw_only=True)
class FileRun:
    """One run of a file."""

    file: str
    number: int
    """The number of the run in its file, from 1."""
    labels: tuple[str, ...]
    """A short text for each run of the file; empty if the file has one run."""
    run: Run | None
    """The run. None: it cannot be used."""
    refusal: str = ""
    """The reason why the run cannot be used, as sentences."""

    @property
    def name(self) -> str:
        """The file, with the number and the label of the run if the file has several."""
        if not self.labels:
            return self.file
        return f"{self.file} --launch {self.number} ({self.labels[self.number - 1]})"


@dataclass(frozen=True, kw_only=True)
class UnreadFile:
    """A file in which no run was read."""

    file: str
    kind: str
    """The kind of the reason, as a short text that many files share."""
    reason: str
    """The reason, as sentences about this file."""


def list_run_files(folder: Path) -> list[Path]:
    """Return the files of a folder that may describe a run, in the order of their names.

    Hidden files and folders are passed over, and folders that are symbolic links are not followed.
    """
    files = []
    saved_file = locate_run_file(folder)
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(path) / name
            is_wanted = file.suffix in RUN_FILE_SUFFIXES or file == saved_file
            if is_wanted and not name.startswith(".") and file.is_file():
                files.append(file)
    return files


def expand_paths(paths: Iterable[str]) -> list[str]:
    """Return the files of some paths, each once. A folder is replaced by its files.

    Raises:
        RunConfigError: There is no such path, or a folder has no file that may describe a run.
    """
    expanded: dict[str, None] = {}
    for path in paths:
        location = find_path(path)
        if os.path.isdir(location):  # noqa: PTH112  Path.is_dir raises for a name that is too long
            files = list_run_files(location)
            if not files:
                raise RunConfigError(
                    f"{path}: holds no file of a run ({', '.join(RUN_FILE_SUFFIXES)}). Give another folder."
                )
            expanded.update(dict.fromkeys(map(str, files)))
        elif not os.path.exists(location):  # noqa: PTH110  as above
            raise RunConfigError(f"{path}: there is no such file or folder. Give the path of one.")
        else:
            expanded[path] = None
    return list(expanded)


def read_file_runs(
    files: Iterable[str], read: Callable[[str, int | None], Run]
) -> Iterator[FileRun | UnreadFile]:
    """Yield each run of some files, and each file in which no run was read.

    Args:
        read: Returns the run of a file by its number. None: the first run.
    """
    for file in files:
        try:
            first = read(file, None)
        except UnreadFileError as error:
            yield UnreadFile(file=file, kind=error.kind, reason=str(error))
            continue
        except MissingExtraError:
            raise
        except BridgeError as error:
            yield FileRun(file=file, number=1, labels=(), run=None, refusal=str(error))
            continue
        labels = first.reading.launches.labels
        yield FileRun(file=file, number=1, labels=labels, run=first)
        for number in range(2, len(labels) + 1):
            yield _read_further_run(file, number, labels, read)


def _read_further_run(
    file: str, number: int, labels: tuple[str, ...], read: Callable[[str, int | None], Run]
) -> FileRun:
    """Return a run after the first of a file, by its number."""
    run, refusal = None, ""
    try:
        run = read(file, number)
    except BridgeError as error:
        refusal = str(error)
    return FileRun(file=file, number=number, labels=labels, run=run, refusal=refusal)
