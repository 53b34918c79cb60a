"""Functions that read a folder of checkpoints: its steps, and Megatron's pointer to the newest."""

import logging
import os
import re
from contextlib import suppress
from pathlib import Path

from bridge.errors import Finding
from bridge.runtime.checkpoint.manifest import MANIFEST_FILE

LATEST_FILE = "latest_checkpointed_iteration.txt"
"""The pointer, by Megatron's name: a file with the step of the newest complete checkpoint."""
MAX_POINTER_DIGITS = 19
"""Digits of the largest step that a pointer may name. Megatron's steps have 64 bits."""
_STEP_FOLDER_PATTERN = re.compile(r"iter_(\d{7,})\Z")

logger = logging.getLogger(__name__)


def get_step_folder(folder: Path, iteration: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return folder / f"iter_{iteration:07d}"


def list_iterations(folder: Path) -> list[int]:
    """Return the steps of all checkpoints in a folder, finished or not, the newest first.

    A folder that does not exist has none.
    """
    if not folder.is_dir():
        return []
    iterations = []
    for path in folder.iterdir():
        match = _STEP_FOLDER_PATTERN.match(path.name)
        if match is not None:
            iterations.append(int(match[1]))
    return sorted(iterations, reverse=True)


def is_finished(checkpoint: Path) -> bool:
    """Return whether a checkpoint was written to its end: its manifest is written last."""
    return (checkpoint / MANIFEST_FILE).is_file()


def find_newest_finished(folder: Path) -> int | None:
    """Return the step of the newest finished checkpoint, or None without a finished checkpoint."""
    for iteration in list_iterations(folder):
        if is_finished(get_step_folder(folder, iteration)):
            return iteration
    return None


def read_latest_iteration(folder: Path) -> int | None:
    """Return the step that the pointer of a folder names, or None without a readable pointer."""
    pointer = folder / LATEST_FILE
    if not pointer.is_file():
        return None
    step_text = ""
    with suppress(OSError), pointer.open(errors="replace") as stream:
        step_text = stream.read(100).strip()
    if not step_text.isdecimal() or len(step_text) > MAX_POINTER_DIGITS:
        return None
    return int(step_text)


def list_resumable_iterations(folder: Path) -> list[int]:
    """Return the steps of the checkpoints that a run may resume from, the newest first.

    The first is the step that the pointer names. Without a pointer it is the newest step. A warning
    is logged if the pointer names a step without a checkpoint.
    """
    iterations = list_iterations(folder)
    latest = read_latest_iteration(folder)
    if latest is None:
        return iterations
    if latest not in iterations:
        logger.warning(
            "checkpoint.load: %s names step %d, whose checkpoint is missing.",
            folder / LATEST_FILE,
            latest,
        )
    return [iteration for iteration in iterations if iteration <= latest]


def find_load_fault(folder: Path) -> Finding | None:
    """Return the fault of a folder, or None if it has a checkpoint to resume from."""
    if list_iterations(folder):
        return None
    remedy = "Give the folder that an earlier run saved to, or leave it at None to start fresh."
    return Finding(
        path="checkpoint.load", rule="no checkpoint there", value=str(folder), remedy=remedy
    )


def find_pointer_fault(folder: Path, key: str) -> Finding | None:
    """Return the fault of a pointer that a run cannot replace, or None if it can.

    Args:
        folder: Folder of checkpoints.
        key: Setting that names the folder, for the message.
    """
    pointer = folder / LATEST_FILE
    if not os.path.lexists(pointer) or pointer.is_file():
        return None
    return Finding(
        path=key, rule=f"{LATEST_FILE} must be a file", value=str(pointer), remedy="Move it away."
    )


def rename_aside(checkpoint: Path, why: str) -> None:
    """Rename a checkpoint whose folder a new checkpoint needs, and log it. No file is deleted.

    Args:
        why: "unfinished" or "skipped", the suffix of the new name. A number follows if it is taken.
    """
    renamed = checkpoint.with_name(f"{checkpoint.name}.{why}")
    number = 0
    while renamed.exists():
        number += 1
        renamed = checkpoint.with_name(f"{checkpoint.name}.{why}{number}")
    checkpoint.rename(renamed)
    logger.warning("checkpoint.save: %s is %s and is renamed to %s.", checkpoint, why, renamed.name)
