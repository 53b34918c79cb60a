"""The contents of a checkpoint for people: which run wrote it, and the tensors by part and dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bridge.errors import CheckpointError
from bridge.precision.grouping import grouped
from bridge.runtime.checkpoint.folder import candidates, folder_of, is_finished, load_fault
from bridge.runtime.checkpoint.manifest import Manifest, digest, outline
from bridge.runtime.checkpoint.pickles import METADATA, Tensor, read_listing
from bridge.runtime.checkpoint.precision_change import DERIVED, Change, precision_changes

STATE = "optimizer.state."
SCALING = ".fp8_state."
PARTS = {
    "param": "master weights",
    "fp32_param": "master weights",
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
}
"""Megatron's name in the optimizer's state -> the part of the training state."""
HALVES = ("bf16", "fp16", *DERIVED)
"""Settings that a change of the mode stands for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The tensors of one part of the training state in one dtype."""

    part: str
    dtype: str
    tensors: int = 0
    elements: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of their values."""
        kind = self.dtype.partition("_")[0]  # float8 of float8_e4m3fn
        bits = "".join(filter(str.isdigit, kind))
        if not bits:  # bool
            return self.elements
        return self.elements * int(bits) // 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """A checkpoint as its manifest and its listing describe it; no value of a tensor was read."""

    path: Path
    run: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the run that wrote it; empty without a manifest."""
    manifest_digest: str | None = None
    """None: it has no manifest."""
    files: int
    bytes: int
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, checkpoint: Path) -> Contents:
        """Return the contents of a checkpoint. No code of its files is run, and torch is not imported."""
        sizes = outline(checkpoint)
        run: Mapping[str, Any] = {}
        manifest_digest = None
        if is_finished(checkpoint):
            run = Manifest.read(checkpoint).run
            manifest_digest = digest(checkpoint)
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
        """The settings of the run that wrote it."""
        settings: Mapping[str, str] = self.run.get("settings", {})
        return settings

    @property
    def parts(self) -> list[Part]:
        """The tensors by part of the training state and dtype."""
        sizes = []
        for key, tensor in self.tensors.items():
            sizes.append(((_part_of(key), tensor.dtype), tensor.elements))
        parts = []
        for (part, dtype), elements in grouped(sizes).items():
            parts.append(
                Part(part=part, dtype=dtype, tensors=len(elements), elements=sum(elements))
            )
        return parts

    def to_dict(self) -> dict[str, Any]:
        """Return the contents as plain data."""
        return {
            "path": str(self.path),
            "manifest_sha256": self.manifest_digest,
            "run": dict(self.run),
            "files": self.files,
            "bytes": self.bytes,
            "parts": [{**asdict(part), "bytes": part.bytes} for part in self.parts],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """What differs between two checkpoints; `changes` are those of a run in the second's precision."""

    changes: tuple[Change, ...]
    settings: tuple[dict[str, str], ...]
    """`setting`, `a` and `b` of each; those of `changes` are left out."""
    tensors: tuple[dict[str, str], ...]
    """`tensor`, and its dtype and shape as `a` and `b`."""

    @classmethod
    def of(cls, one: Contents, two: Contents) -> Difference:
        """Return what differs between two checkpoints."""
        changes: list[Change] = []
        if two.settings:
            changes = precision_changes(one.settings, two.settings)
        shown = {change.path.rpartition(".")[2] for change in changes}
        if changes:
            shown.update(HALVES)
        settings = []
        for row in _differing("setting", one.settings, two.settings):
            if row["setting"].rpartition(".")[2] not in shown:
                settings.append(row)
        tensors = _differing("tensor", one.tensors, two.tensors)
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


def checkpoint_at(path: Path) -> Path:
    """Return the checkpoint that a path names: itself, or the newest one of a folder of checkpoints."""
    numbers: list[int] = []
    try:
        if (path / METADATA).is_file():
            return path
        if load_fault(path) is None:
            numbers = candidates(path)
    except OSError:
        numbers = []
    if not numbers:
        rule = "must be a checkpoint, or a folder of checkpoints"
        raise CheckpointError(
            f"{path!s:.200}: {rule}. Give a folder such as checkpoints/iter_0000100."
        )
    return folder_of(path, numbers[0])


def _part_of(key: str) -> str:
    if key.startswith(STATE):
        name = key.removeprefix(STATE).partition(".")[0]
        return PARTS.get(name, f"optimizer {name}")
    if SCALING in key:
        return "delayed scales"
    return "weights"


def _differing(
    heading: str, one: Mapping[str, object], two: Mapping[str, object]
) -> Iterator[dict[str, str]]:
    for name in {**one, **two}:
        before, now = str(one.get(name, "absent")), str(two.get(name, "absent"))
        if before != now:
            yield {heading: name, "a": before, "b": now}
