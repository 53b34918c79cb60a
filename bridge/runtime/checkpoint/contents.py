"""`Contents`: the run and the tensors of a checkpoint, which `checkpoint` commands show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bridge.errors import CheckpointError
from bridge.precision.grouping import group_pairs
from bridge.runtime.checkpoint.folder import (
    find_load_fault,
    get_step_folder,
    is_finished,
    list_resumable_iterations,
)
from bridge.runtime.checkpoint.manifest import Manifest, compute_manifest_digest, list_file_sizes
from bridge.runtime.checkpoint.pickles import METADATA_FILE, Tensor, read_listing
from bridge.runtime.checkpoint.precision_change import (
    DTYPE_FIELDS,
    PrecisionChange,
    find_precision_changes,
)

OPTIMIZER_STATE_PREFIX = "optimizer.state."
"""Beginning of the names of the optimizer's tensors."""
FP8_STATE_KEY = ".fp8_state."
"""Part of the names of delayed scales and amax histories."""
STATE_PART_NAMES = {
    "param": "master weights",
    "fp32_param": "master weights",
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
}
"""Megatron's name in the optimizer's state -> the part of the training state."""
MODE_SETTINGS = ("bf16", "fp16", *DTYPE_FIELDS)
"""Settings that follow from the mode. They are not listed if a change of mode is listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The tensors of a part of the training state that have the same dtype."""

    part: str
    """weights, master weights, first moments, second moments, delayed scales, ..."""
    dtype: str
    """Torch's name without ``torch.``."""
    tensors: int = 0
    """Number of tensors."""
    elements: int = 0
    """Number of elements of all tensors together."""

    @property
    def bytes(self) -> int:
        """Bytes of the tensors' values."""
        name = self.dtype.partition("_")[0]  # float8 of float8_e4m3fn
        bits = "".join(filter(str.isdigit, name))
        if not bits:  # bool, a byte per element
            return self.elements
        return self.elements * int(bits) // 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """A checkpoint as its manifest and its listing describe it, without the values of tensors."""

    path: Path
    """Folder of the checkpoint."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the run that wrote the checkpoint; empty without a manifest."""
    manifest_digest: str | None = None
    """SHA-256 of the manifest in hexadecimal. None: no manifest."""
    files: int
    """Number of files, without the manifest."""
    bytes: int
    """Bytes of these files."""
    tensors: Mapping[str, Tensor]
    """Key -> dtype and shape."""

    @classmethod
    def read(cls, checkpoint: Path) -> Contents:
        """Return the contents of a checkpoint.

        No code of its files is run, and torch is not imported.

        Raises:
            DamagedCheckpointError: The manifest or the listing cannot be read.
        """
        sizes = list_file_sizes(checkpoint)
        run: Mapping[str, Any] = {}
        manifest_digest = None
        if is_finished(checkpoint):
            run = Manifest.read(checkpoint).run
            manifest_digest = compute_manifest_digest(checkpoint)
        return cls(
            path=checkpoint,
            run=run,
            manifest_digest=manifest_digest,
            files=len(sizes),
            bytes=sum(sizes.values()),
            tensors=read_listing(checkpoint).tensors,
        )

    @property
    def settings(self) -> Mapping[str, str]:
        """Path -> value of the settings of the run that wrote the checkpoint."""
        settings: Mapping[str, str] = self.run.get("settings", {})
        return settings

    @property
    def parts(self) -> list[Part]:
        """The tensors by part of the training state and dtype."""
        sizes = []
        for key, tensor in self.tensors.items():
            sizes.append(((_get_part(key), tensor.dtype), tensor.elements))
        parts = []
        for (part, dtype), elements in group_pairs(sizes).items():
            parts.append(
                Part(part=part, dtype=dtype, tensors=len(elements), elements=sum(elements))
            )
        return parts

    def to_dict(self) -> dict[str, Any]:
        """Return the contents as plain data."""
        parts = []
        for part in self.parts:
            parts.append({**asdict(part), "bytes": part.bytes})
        return {
            "path": str(self.path),
            "manifest_sha256": self.manifest_digest,
            "run": dict(self.run),
            "files": self.files,
            "bytes": self.bytes,
            "parts": parts,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The differences between two checkpoints."""

    changes: tuple[PrecisionChange, ...]
    """Changes of precision of a run that resumes the first checkpoint in the second's precision."""
    settings: tuple[dict[str, str], ...]
    """Rows of the other settings that differ: `setting`, and its values `a` and `b`."""
    tensors: tuple[dict[str, str], ...]
    """Rows of the tensors that differ: `tensor`, and its dtypes and shapes `a` and `b`."""

    @classmethod
    def from_contents(cls, first: Contents, second: Contents) -> Difference:
        """Return the differences between two checkpoints."""
        changes: list[PrecisionChange] = []
        if second.settings:
            changes = find_precision_changes(first.settings, second.settings)
        names_in_changes = {change.path.rpartition(".")[2] for change in changes}
        if changes:
            names_in_changes.update(MODE_SETTINGS)
        settings = []
        for row in _list_differing_entries("setting", first.settings, second.settings):
            if row["setting"].rpartition(".")[2] not in names_in_changes:
                settings.append(row)
        tensors = _list_differing_entries("tensor", first.tensors, second.tensors)
        return cls(changes=tuple(changes), settings=tuple(settings), tensors=tuple(tensors))

    def __bool__(self) -> bool:
        return bool(self.changes or self.settings or self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as plain data."""
        changes = [asdict(change) for change in self.changes]
        return {
            "precision": changes,
            "settings": list(self.settings),
            "tensors": list(self.tensors),
        }


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint at a path, or the newest checkpoint of a folder of checkpoints.

    Raises:
        CheckpointError: The path is neither of them, or cannot be read.
    """
    iterations: list[int] = []
    try:
        if (path / METADATA_FILE).is_file():
            return path
        if find_load_fault(path) is None:
            iterations = list_resumable_iterations(path)
    except OSError:  # reported below
        iterations = []
    if not iterations:
        raise CheckpointError(
            f"{path!s:.200}: must be a checkpoint, or a folder of checkpoints. "
            "Give a folder such as checkpoints/iter_0000100."
        )
    return get_step_folder(path, iterations[0])


def _get_part(key: str) -> str:
    """Return the part of the training state to which a tensor with this key belongs."""
    if key.startswith(OPTIMIZER_STATE_PREFIX):
        name = key.removeprefix(OPTIMIZER_STATE_PREFIX).partition(".")[0]
        return STATE_PART_NAMES.get(name, f"optimizer {name}")
    if FP8_STATE_KEY in key:
        return "delayed scales"
    return "weights"


def _list_differing_entries(
    heading: str, first: Mapping[str, object], second: Mapping[str, object]
) -> Iterator[dict[str, str]]:
    """Yield a row of name and both values for each entry that differs between two mappings.

    Args:
        heading: Key of the name in a row.
        first: The entries of the first checkpoint. A missing entry has the value "absent".
        second: The entries of the second checkpoint.
    """
    for name in {**first, **second}:
        in_first = str(first.get(name, "absent"))
        in_second = str(second.get(name, "absent"))
        if in_first != in_second:
            yield {heading: name, "a": in_first, "b": in_second}
