"""The manifest of a checkpoint: name, size and checksum of each of its files, written after all of them.

A checkpoint without a manifest was never finished. One whose files do not match it is damaged, and is not read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = "manifest.json"
ALGORITHM = "sha256"
_NAME = re.compile(r"iter_(\d{7,})\Z")
_LARGEST = 64 * 2**20
"""Bytes of the largest manifest that is read; a checkpoint of 100,000 files has one of 12 MB."""


def folder_of(folder: Path, iteration: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return folder / f"iter_{iteration:07d}"


def iterations(folder: Path) -> list[int]:
    """Return the steps of all checkpoints in a folder, finished or not, the newest first."""
    if not folder.is_dir():
        return []
    found = [_NAME.match(path.name) for path in folder.iterdir()]
    return sorted((int(match[1]) for match in found if match is not None), reverse=True)


def is_finished(checkpoint: Path) -> bool:
    """Return whether a checkpoint was written to its end."""
    return (checkpoint / MANIFEST).is_file()


def contents(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Return name -> size and checksum of every file of a checkpoint."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {
        path.relative_to(checkpoint).as_posix(): {"bytes": path.stat().st_size, ALGORITHM: _checksum(path)}
        for path in files
    }


def write_manifest(checkpoint: Path, files: dict[str, dict[str, Any]]) -> None:
    """Write a manifest so that it is there as a whole or not at all."""
    scratch = checkpoint / f"{MANIFEST}.tmp"
    with scratch.open("w") as stream:
        json.dump({"files": files}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    scratch.replace(checkpoint / MANIFEST)


def damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, as a clause, or None where every file is as it was written."""
    path = checkpoint / MANIFEST
    try:
        if path.stat().st_size > _LARGEST:
            return f"{MANIFEST} is too large"
        files = json.loads(path.read_bytes())["files"]
        for name, facts in files.items():
            fault = _fault(checkpoint / name, name, facts)
            if fault is not None:
                return fault
    except FileNotFoundError:
        return f"{MANIFEST}, which is written last, is missing"
    except OSError as error:
        return f"it cannot be read ({(error.strerror or type(error).__name__).lower()})"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return f"{MANIFEST} is damaged"
    return None


def _fault(path: Path, name: str, facts: dict[str, Any]) -> str | None:
    if not path.is_file():
        return f"{name} is missing"
    size = path.stat().st_size
    if size != facts["bytes"]:
        return f"{name} has {size} bytes, and had {facts['bytes']} when it was written"
    if _checksum(path) != facts[ALGORITHM]:
        return f"{name} has other content than when it was written"
    return None


def _checksum(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, ALGORITHM).hexdigest()
