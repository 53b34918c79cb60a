"""`FileReading`: what one file says of a run, in our section names, Megatron's field names and plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bridge.precision.grouping import grouped
from bridge.rules.target import Target
from bridge.rules.versions import Version

PRECISION_BRIDGE = "Precision Bridge"
MEGATRON_BRIDGE = "Megatron Bridge"
MEGATRON_LM = "Megatron-LM"


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived:
    """One value that a framework sets at the start of a run, over the one in the file."""

    path: str
    """Dotted key ("ddp.align_param_gather")."""
    value: Any
    stated: Any = None
    """The value in the file; None where it states none."""
    because: str = ""
    """The setting or the condition that it follows from: "comm_overlap"."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"path": self.path, "value": self.value, "in_file": self.stated, "because": self.because}


@dataclass(frozen=True, kw_only=True, slots=True)
class FileReading:
    """One file that describes a run, as read; overrides are written over its sections afterwards."""

    framework: str = PRECISION_BRIDGE
    """The framework that starts a run of this file."""
    sections: Mapping[str, Any] = field(default_factory=dict)
    """Our section and key names -> plain values with Megatron's field spellings, `mixed_precision` among them."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Dotted key of the file, or its beginning -> ours, where they differ; an override may be written with either."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the file sets."""
    derived: tuple[Derived, ...] = ()
    """Values that the framework sets at start; they stand in the sections of the run, not in `sections`."""
    own_fields: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key of a field of the framework's own classes, which Megatron Core does not have -> its value."""
    unknown: tuple[str, ...] = ()
    """What the file leaves open, as sentences."""
    unplanned: str | None = None
    """Why the run has no plan, as a sentence: the source of its layers, or of their precision, is not read."""
    uncounted: tuple[str, ...] = ()
    """Options that may bear on the layout, the layers or the bytes and are not read: memory gives no verdict."""
    opened: Mapping[str, str] = field(default_factory=dict)
    """Setting whose value a source that is not read may change -> that source, as a noun."""
    read_too: tuple[str, ...] = ()
    """Other files that were read, as sentences."""
    release: Version | None = None
    """The release of Megatron Core that the file is of; None: the file says nothing, and the installed one counts."""
    release_reason: str = ""
    """Why that release is assumed, as a clause."""

    @property
    def lines(self) -> tuple[str, ...]:
        """What an answer has to say of the file, as sentences: the release, what is set at start, what is open."""
        release = f"megatron-core {self.release} ({self.release_reason})."
        if self.release is None:
            release = "No release of megatron-core is known: the target states none."
        by_reason = grouped((one.because, f"{one.path}={one.value}") for one in self.derived)
        set_ = [f"{self.framework} sets at start: {', '.join(all_)} ({why})." for why, all_ in by_reason.items()]
        return (release, *set_, *self.read_too, *self.open)

    @property
    def open(self) -> tuple[str, ...]:
        """What the file leaves open, as sentences, the source without which there is no plan first."""
        if self.unplanned is None:
            return self.unknown
        return (self.unplanned, *self.unknown)

    def to_dict(self) -> dict[str, Any]:
        """Return what an answer has to say of the file, as plain data."""
        return {
            "framework": self.framework,
            "megatron_core": str(self.release) if self.release is not None else None,
            "because": self.release_reason,
            "set_at_start": [one.to_dict() for one in self.derived],
            "read_too": list(self.read_too),
            "open": list(self.open),
            "unplanned": self.unplanned,
            "uncounted": list(self.uncounted),
        }

    def released(self, target: Target, *, is_stated: bool) -> FileReading:
        """Return the reading with the release of the target, or the installed one, where the file says none."""
        if self.release is not None or target.mcore is None:
            return self
        is_here = target.is_detected or not is_stated
        reason = "installed here" if is_here else "stated by the target"
        return replace(self, release=target.mcore, release_reason=reason)

    def own_name(self, key: str) -> str:
        """Return our name of a dotted key that may be written with the file's."""
        for theirs, ours in self.names.items():
            if key == theirs or key.startswith(f"{theirs}."):
                return ours + key[len(theirs) :]
        return key
