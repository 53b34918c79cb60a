"""A folder of checkpoints: ``iter_0000100/`` per step, and Megatron's latest pointer."""

import logging
import os
import re
from contextlib import suppress
from pathlib import Path

from bridge.errors import Finding
from bridge.runtime.checkpoint.manifest import MANIFEST_FILE

LATEST_FILE = "latest_checkpointed_iteration.txt"
"""File with the number of the newest complete checkpoint, Megatron's name."""
_FOLDER_NAME = re.compile(r"iter_(\d{7,})\Z")

logger = logging.getLogger(__name__)


def get_step_folder(folder: Path, iteration: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return folder / f"iter_{iteration:07d}"


def list_iterations(folder: Path) -> list[int]:
    """Return the steps of all checkpoints in a folder, finished or not, the newest first."""
    if not folder.is_dir():
        return []
    numbers = []
    for path in folder.iterdir():
        match = _FOLDER_NAME.match(path.name)
        if match is not None:
            numbers.append(int(match[1]))
    return sorted(numbers, reverse=True)


def is_finished(checkpoint: Path) -> bool:
    """Return whether a checkpoint was written to its end."""
    return (checkpoint / MANIFEST_FILE).is_file()


def find_newest_finished(folder: Path) -> int | None:
    """Return the step of the newest checkpoint that was written to its end, or None."""
    for number in list_iterations(folder):
        if is_finished(get_step_folder(folder, number)):
            return number
    return None


def read_latest_iteration(folder: Path) -> int | None:
    """Return the number in the pointer of a folder, None for a missing or incomplete pointer."""
    if not (folder / LATEST_FILE).is_file():
        return None
    text = ""
    with suppress(OSError), (folder / LATEST_FILE).open(errors="replace") as stream:
        text = stream.read(100).strip()
    if not text.isdecimal() or len(text) >= 20:
        return None
    return int(text)


def list_resumable_iterations(folder: Path) -> list[int]:
    """Return the steps of the checkpoints that a run may resume from, the newest first.

    The first is the checkpoint that the pointer names, or without a pointer the newest.
    """
    numbers = list_iterations(folder)
    pointed = read_latest_iteration(folder)
    if pointed is None:
        return numbers
    if pointed not in numbers:
        logger.warning(
            "checkpoint.load: %s names step %d, whose checkpoint is missing.",
            folder / LATEST_FILE,
            pointed,
        )
    return [number for number in numbers if number <= pointed]


def find_load_fault(folder: Path) -> Finding | None:
    """Return the fault of a folder without a checkpoint, or None."""
    if list_iterations(folder):
        return None
    remedy = "Give the folder that an earlier run saved to, or leave it at None to start fresh."
    return Finding(
        path="checkpoint.load", rule="no checkpoint there", value=str(folder), remedy=remedy
    )


def find_pointer_fault(folder: Path, key: str) -> Finding | None:
    """Return the fault of a pointer that cannot be replaced, or None; `key` names its folder."""
    pointer = folder / LATEST_FILE
    if not os.path.lexists(pointer) or pointer.is_file():
        return None
    return Finding(
        path=key, rule=f"{LATEST_FILE} must be a file", value=str(pointer), remedy="Move it away."
    )


def rename_aside(checkpoint: Path, why: str) -> None:
    """Rename a checkpoint whose folder a new checkpoint needs; no file is deleted."""
    other = checkpoint.with_name(f"{checkpoint.name}.{why}")
    number = 0
    while other.exists():
        number += 1
        other = checkpoint.with_name(f"{checkpoint.name}.{why}{number}")
    checkpoint.rename(other)
    logger.warning("checkpoint.save: %s is %s and is renamed to %s.", checkpoint, why, other.name)
