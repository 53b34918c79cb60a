"""The manifest of a checkpoint: what wrote it, and name, size and checksum of each of its files, written after all.

A checkpoint without a manifest was never finished, or is of another program. One whose files do not match it is
damaged, and is not read. The manifest holds no secret: it finds damage, and it does not prove who wrote it. Its own
digest, kept elsewhere, proves that neither it nor a file was exchanged (`Manifest.digest`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from bridge.errors import DamagedCheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
ALGORITHM = "sha256"
THREADS = 8
"""Files of one process that are read at the same time; hashing releases Python's lock."""
_WRITER = re.compile(r"__(\d{1,9})_")
"""Begins the name of a file of tensors, with the number of the rank that wrote it."""
_LARGEST = 64 * 2**20
"""Bytes of the largest manifest that is read; a checkpoint of 100,000 files has one of 15 MB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint's manifest says."""

    sizes: Mapping[str, int]
    """File, as a path in the checkpoint's folder -> its bytes."""
    checksums: Mapping[str, str]
    """File -> its SHA-256 in hexadecimal; empty where the run was told to write none."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the run that wrote it, as plain data."""

    @classmethod
    def read(cls, checkpoint: Path) -> Manifest:
        """Return the manifest of a checkpoint."""
        path = checkpoint / MANIFEST
        try:
            if path.exists() and not path.is_file():
                raise DamagedCheckpointError(checkpoint, f"{MANIFEST} is no regular file")
            with path.open("rb") as stream:
                data = stream.read(_LARGEST + 1)
            if len(data) > _LARGEST:
                raise DamagedCheckpointError(checkpoint, f"{MANIFEST} is too large")
            found = json.loads(data)
            files = {str(name): dict(facts) for name, facts in found["files"].items()}
            sizes = {name: int(facts["bytes"]) for name, facts in files.items()}
            checksums = {
                name: str(facts[ALGORITHM]) for name, facts in files.items() if ALGORITHM in facts
            }
            manifest = cls(sizes=sizes, checksums=checksums, run=dict(found.get("run") or {}))
        except FileNotFoundError:
            raise DamagedCheckpointError(
                checkpoint, f"{MANIFEST}, which is written last, is missing"
            ) from None
        except OSError as error:
            raise DamagedCheckpointError(checkpoint, _unreadable(error)) from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            raise DamagedCheckpointError(checkpoint, f"{MANIFEST} is damaged") from None
        if not manifest.is_sound():
            raise DamagedCheckpointError(checkpoint, f"{MANIFEST} is damaged")
        return manifest

    def is_sound(self) -> bool:
        """Return whether it lists files of its own folder, with a checksum each or none at all."""
        for name in self.sizes:
            path = PurePosixPath(name)
            if not path.parts or path.is_absolute() or ".." in path.parts:
                return False
        if not isinstance(self.run.get("settings", {}), dict):
            return False
        return bool(self.sizes) and len(self.checksums) in (0, len(self.sizes))

    def write(self, checkpoint: Path) -> None:
        """Write the manifest so that it is there as a whole or not at all."""
        files: dict[str, dict[str, int | str]] = {}
        for name, size in self.sizes.items():
            files[name] = {"bytes": size}
            if name in self.checksums:
                files[name][ALGORITHM] = self.checksums[name]
        scratch = checkpoint / f"{MANIFEST}.tmp"
        with scratch.open("w") as stream:
            json.dump({"format": FORMAT, "run": dict(self.run), "files": files}, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        scratch.replace(checkpoint / MANIFEST)

    def outline_fault(self, checkpoint: Path) -> str | None:
        """Return which file is missing, has another size or is in no manifest, as a clause, or None."""
        try:
            found = outline(checkpoint)
        except OSError as error:
            return _unreadable(error)
        for name, size in self.sizes.items():
            if name not in found:
                return f"{name} is missing"
            if found[name] != size:
                return f"{name} has {found[name]} bytes, and had {size} when it was written"
        for name in found:
            if name not in self.sizes:
                return f"{name} is not in {MANIFEST}"
        return None

    def content_fault(self, checkpoint: Path, names: Iterable[str]) -> str | None:
        """Return which of some files has other content than when it was written, as a clause, or None."""
        names = list(names)
        try:
            found = checksums(checkpoint, names)
        except OSError as error:
            return _unreadable(error)
        for name in names:
            if found[name] != self.checksums[name]:
                return f"{name} has other content than when it was written"
        return None


def damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, as a clause, or None where every file is as it was written."""
    try:
        manifest = Manifest.read(checkpoint)
    except DamagedCheckpointError as error:
        return error.reason
    return manifest.outline_fault(checkpoint) or manifest.content_fault(
        checkpoint, manifest.checksums
    )


def digest(checkpoint: Path) -> str:
    """Return the SHA-256 of a manifest: whoever noted it elsewhere can prove that no file was exchanged since."""
    return _checksum(checkpoint / MANIFEST)


def outline(checkpoint: Path) -> dict[str, int]:
    """Return name -> bytes of every regular file of a checkpoint, in the order of their names."""
    sizes = {}
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        if name == MANIFEST or path.name.startswith(".nfs"):
            continue
        if path.is_file():
            sizes[name] = path.stat().st_size
    return sizes


def share(names: Iterable[str], rank: int, ranks: int) -> list[str]:
    """Return the files that a rank reads: those that the rank of this number wrote, and may have in its cache."""
    found = []
    for name in names:
        match = _WRITER.match(name)
        writer = 0 if match is None else int(match[1])
        if writer % ranks == rank:
            found.append(name)
    return found


def checksums(checkpoint: Path, names: Iterable[str]) -> dict[str, str]:
    """Return file -> checksum, of files of a checkpoint, several of them read at the same time."""
    with ThreadPoolExecutor(max_workers=min(THREADS, os.cpu_count() or 1)) as pool:
        return dict(pool.map(lambda name: (name, _checksum(checkpoint / name)), names))


def _unreadable(error: OSError) -> str:
    return f"it cannot be read ({(error.strerror or type(error).__name__).lower()})"


def _checksum(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, ALGORITHM).hexdigest()
