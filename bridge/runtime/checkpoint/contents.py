"""The contents of a checkpoint for people: its run, and the tensors by part and dtype."""

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
"""Part of the names of delayed scales and histories."""
STATE_PART_NAMES = {
    "param": "master weights",
    "fp32_param": "master weights",
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
}
"""Megatron's name in the optimizer's state -> the part of the training state."""
MODE_SETTINGS = ("bf16", "fp16", *DTYPE_FIELDS)
"""Settings that change with the mode, and are not listed next to a change of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The tensors of a part of the training state that have the same dtype."""

    part: str
    dtype: str
    tensors: int = 0
    elements: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of the tensors' values."""
        kind = self.dtype.partition("_")[0]  # float8 of float8_e4m3fn
        digits = "".join(filter(str.isdigit, kind))
        if not digits:  # bool
            return self.elements
        return self.elements * int(digits) // 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """A checkpoint as its manifest and its listing describe it; no value of a tensor was read."""

    path: Path
    run: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the run that wrote the checkpoint; empty without a manifest."""
    manifest_digest: str | None = None
    """SHA-256 of the manifest, None without a manifest."""
    files: int
    bytes: int
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, checkpoint: Path) -> Contents:
        """Return the contents of a checkpoint.

        No code of its files is run, and torch is not imported.
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
        """The settings of the run that wrote the checkpoint."""
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
    """`setting`, `a` and `b` of each other setting that differs."""
    tensors: tuple[dict[str, str], ...]
    """`tensor`, and its dtype and shape in both checkpoints as `a` and `b`."""

    @classmethod
    def from_contents(cls, first: Contents, second: Contents) -> Difference:
        """Return the differences between two checkpoints."""
        changes: list[PrecisionChange] = []
        if second.settings:
            changes = find_precision_changes(first.settings, second.settings)
        shown = {change.path.rpartition(".")[2] for change in changes}
        if changes:
            shown.update(MODE_SETTINGS)
        settings = []
        for row in _list_differing_entries("setting", first.settings, second.settings):
            if row["setting"].rpartition(".")[2] not in shown:
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
    """Return the checkpoint of a path: the path, or the newest checkpoint of a folder.

    Raises:
        CheckpointError: There is none.
    """
    numbers: list[int] = []
    try:
        if (path / METADATA_FILE).is_file():
            return path
        if find_load_fault(path) is None:
            numbers = list_resumable_iterations(path)
    except OSError:
        numbers = []
    if not numbers:
        rule = "must be a checkpoint, or a folder of checkpoints"
        raise CheckpointError(
            f"{path!s:.200}: {rule}. Give a folder such as checkpoints/iter_0000100."
        )
    return get_step_folder(path, numbers[0])


def _get_part(key: str) -> str:
    """Return the part of the training state that a tensor belongs to, by its key."""
    if key.startswith(OPTIMIZER_STATE_PREFIX):
        name = key.removeprefix(OPTIMIZER_STATE_PREFIX).partition(".")[0]
        return STATE_PART_NAMES.get(name, f"optimizer {name}")
    if FP8_STATE_KEY in key:
        return "delayed scales"
    return "weights"


def _list_differing_entries(
    heading: str, first: Mapping[str, object], second: Mapping[str, object]
) -> Iterator[dict[str, str]]:
    """Yield name and both values of each entry that differs between two mappings."""
    for name in {**first, **second}:
        before = str(first.get(name, "absent"))
        now = str(second.get(name, "absent"))
        if before != now:
            yield {heading: name, "a": before, "b": now}
