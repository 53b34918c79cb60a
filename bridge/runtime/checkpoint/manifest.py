"""`Manifest`: the run of a checkpoint, and name, size and checksum of each of its files.

The manifest is written after all files. A checkpoint without a manifest was not finished, or
another program wrote it. A checkpoint whose files do not match the manifest is damaged, and is not
read.

A manifest shows damage. It does not prove who wrote the checkpoint, since anybody can write a
manifest for other files. The digest of the manifest, stored in another place, proves that neither
the manifest nor a file was exchanged (`compute_manifest_digest`).
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

MANIFEST_FILE = "manifest.json"
MANIFEST_FORMAT = 1
"""Version of the manifest's form. A manifest of another version is not read."""
CHECKSUM_ALGORITHM = "sha256"
CHECKSUM_THREADS = 8
"""Files that one process reads at the same time. Hashing releases Python's lock."""
_WRITER_RANK_PATTERN = re.compile(r"__(\d{1,9})_")
"""The beginning of the name of a file of tensors, with the number of the rank that wrote it."""
_MAX_MANIFEST_BYTES = 64 * 2**20
"""Bytes of the largest manifest that is read. 100,000 files have a manifest of 15 MB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Sizes and checksums of a checkpoint's files, and facts about its run."""

    sizes: Mapping[str, int]
    """Path of a file in the checkpoint's folder -> its bytes."""
    checksums: Mapping[str, str]
    """Path -> SHA-256 in hexadecimal; empty for a run with `checkpoint.checksum=false`."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the run that wrote the checkpoint, as plain data."""

    @classmethod
    def read(cls, checkpoint: Path) -> Manifest:
        """Return the manifest of a checkpoint.

        Raises:
            DamagedCheckpointError: The manifest is missing, damaged, too large, or of another
                format.
        """
        data = _read_manifest_bytes(checkpoint)
        try:
            content = json.loads(data)
            manifest_format = content["format"]
            if manifest_format != MANIFEST_FORMAT:
                raise DamagedCheckpointError(
                    checkpoint,
                    f"{MANIFEST_FILE} has format {manifest_format!r:.40}, and this release reads "
                    f"format {MANIFEST_FORMAT}",
                )
            manifest = cls._from_content(content)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            raise DamagedCheckpointError(checkpoint, f"{MANIFEST_FILE} is damaged") from None
        if not manifest.is_sound():
            raise DamagedCheckpointError(checkpoint, f"{MANIFEST_FILE} is damaged")
        return manifest

    @classmethod
    def _from_content(cls, content: Any) -> Manifest:
        """Return the manifest of the content of its file.

        Raises:
            ValueError, TypeError, KeyError, AttributeError, OverflowError: The content has another
                form.
        """
        sizes: dict[str, int] = {}
        checksums: dict[str, str] = {}
        for name, facts in content["files"].items():
            entry = dict(facts)
            sizes[str(name)] = int(entry["bytes"])
            if CHECKSUM_ALGORITHM in entry:
                checksums[str(name)] = str(entry[CHECKSUM_ALGORITHM])
        return cls(sizes=sizes, checksums=checksums, run=dict(content.get("run") or {}))

    def is_sound(self) -> bool:
        """Return whether the manifest can belong to a checkpoint.

        Such a manifest names at least one file. All files are in the checkpoint's folder. Either
        all files have a checksum, or none has.
        """
        for name in self.sizes:
            path = PurePosixPath(name)
            if not path.parts or path.is_absolute() or ".." in path.parts:
                return False
        if not isinstance(self.run.get("settings", {}), dict):
            return False
        return bool(self.sizes) and len(self.checksums) in (0, len(self.sizes))

    def write(self, checkpoint: Path) -> None:
        """Write the manifest into the folder of its checkpoint.

        The file is renamed into place when it is complete and on the disk, so that no program ever
        reads a part of it.
        """
        files: dict[str, dict[str, int | str]] = {}
        for name, size in self.sizes.items():
            files[name] = {"bytes": size}
            if name in self.checksums:
                files[name][CHECKSUM_ALGORITHM] = self.checksums[name]
        content = {"format": MANIFEST_FORMAT, "run": dict(self.run), "files": files}
        scratch = checkpoint / f"{MANIFEST_FILE}.tmp"
        with scratch.open("w") as stream:
            json.dump(content, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        scratch.replace(checkpoint / MANIFEST_FILE)

    def find_outline_fault(self, checkpoint: Path) -> str | None:
        """Return a clause about a missing, resized or unlisted file.

        The result is None without such a file.
        """
        try:
            present = list_file_sizes(checkpoint)
        except OSError as error:
            return _describe_read_error(error)
        for name, size in self.sizes.items():
            if name not in present:
                return f"{name} is missing"
            if present[name] != size:
                return f"{name} has {present[name]} bytes, and had {size} when it was written"
        for name in present:
            if name not in self.sizes:
                return f"{name} is not in {MANIFEST_FILE}"
        return None

    def find_content_fault(self, checkpoint: Path, names: Iterable[str]) -> str | None:
        """Return a clause about a file with changed content, or None without such a file.

        Args:
            names: The files to read, all of which have a checksum.
        """
        names = list(names)
        try:
            present = compute_checksums(checkpoint, names)
        except OSError as error:
            return _describe_read_error(error)
        for name in names:
            if present[name] != self.checksums[name]:
                return f"{name} has other content than when it was written"
        return None


def _read_manifest_bytes(checkpoint: Path) -> bytes:
    """Return the content of a checkpoint's manifest.

    Raises:
        DamagedCheckpointError: The file is missing, too large or not regular, or cannot be read.
    """
    path = checkpoint / MANIFEST_FILE
    try:
        if path.exists() and not path.is_file():  # a pipe or a device could block for ever
            raise DamagedCheckpointError(checkpoint, f"{MANIFEST_FILE} is no regular file")
        with path.open("rb") as stream:
            data = stream.read(_MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        raise DamagedCheckpointError(
            checkpoint, f"{MANIFEST_FILE}, which is written last, is missing"
        ) from None
    except OSError as error:
        raise DamagedCheckpointError(checkpoint, _describe_read_error(error)) from None
    if len(data) > _MAX_MANIFEST_BYTES:
        raise DamagedCheckpointError(checkpoint, f"{MANIFEST_FILE} is too large")
    return data


def find_damage(checkpoint: Path) -> str | None:
    """Return a clause about the damage of a checkpoint.

    The result is None if no file has changed.
    """
    try:
        manifest = Manifest.read(checkpoint)
    except DamagedCheckpointError as error:
        return error.reason
    fault = manifest.find_outline_fault(checkpoint)
    if fault is not None:
        return fault
    return manifest.find_content_fault(checkpoint, manifest.checksums)


def compute_manifest_digest(checkpoint: Path) -> str:
    """Return the SHA-256 of a checkpoint's manifest in hexadecimal."""
    return _compute_checksum(checkpoint / MANIFEST_FILE)


def list_file_sizes(checkpoint: Path) -> dict[str, int]:
    """Return path -> bytes of every regular file of a checkpoint, sorted by path.

    The manifest is left out.
    """
    sizes = {}
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        # NFS renames a deleted file that is still open to .nfs...
        if name == MANIFEST_FILE or path.name.startswith(".nfs"):
            continue
        if path.is_file():
            sizes[name] = path.stat().st_size
    return sizes


def select_rank_files(names: Iterable[str], rank: int, ranks: int) -> list[str]:
    """Return the files that a rank reads to compute their checksums.

    A rank reads the files that the same rank wrote, since its machine may have them in its cache. A
    file without a writer's number in its name counts as one of rank 0.

    Args:
        names: All files of a checkpoint.
        ranks: Number of ranks. It may differ from the number of ranks that wrote the checkpoint.
    """
    files_of_rank = []
    for name in names:
        writer = 0
        match = _WRITER_RANK_PATTERN.match(name)
        if match is not None:
            writer = int(match[1])
        if writer % ranks == rank:
            files_of_rank.append(name)
    return files_of_rank


def compute_checksums(checkpoint: Path, names: Iterable[str]) -> dict[str, str]:
    """Return path -> checksum of some files of a checkpoint.

    Up to `CHECKSUM_THREADS` files are read at the same time.
    """
    with ThreadPoolExecutor(max_workers=min(CHECKSUM_THREADS, os.cpu_count() or 1)) as pool:
        return dict(pool.map(lambda name: (name, _compute_checksum(checkpoint / name)), names))


def _describe_read_error(error: OSError) -> str:
    """Return the clause about a checkpoint of which a file cannot be read."""
    reason = error.strerror or type(error).__name__
    return f"it cannot be read ({reason.lower()})"


def _compute_checksum(path: Path) -> str:
    """Return the checksum of a file in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, CHECKSUM_ALGORITHM).hexdigest()
