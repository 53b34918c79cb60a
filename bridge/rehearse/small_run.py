"""`SmallRun`: a run that is made small, and the changes that are made to it."""

from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
from typing import Any

from bridge.errors import Finding
from bridge.model.layout import ParallelLayout
from bridge.model.shape import ModelShape
from bridge.plan.precision_plan import PrecisionPlan
from bridge.precision.schemes import SCHEMES
from bridge.rehearse.layout import LaunchLayout

MIN_ALIGNMENT = 16
"""Multiple of widths where no scheme needs a larger one.

Tensor cores and Transformer Engine's FP8 GEMMs take it.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A setting that has another value in the rehearsal than in the run."""

    field: str
    """section.field."""
    before: Any
    after: Any
    reason: str
    """The reason for the new value, as a clause."""


@dataclass(kw_only=True)
class SmallRun:
    """A run that is made small, together with the plan of the run before that."""

    sections: dict[str, dict[str, Any]]
    """model, optimizer, ddp and train, for one process."""
    precision: dict[str, Any] | None
    """The stated fields of the precision; None where the configs alone decide it."""
    plan: PrecisionPlan
    """The plan of the run before it is made small."""
    parallel: ParallelLayout
    """The parallel layout of the run before it is made small."""
    layout: LaunchLayout
    """Every kind of parallelism of the run, each at size 2."""
    layers: tuple[str, ...] = ()
    """Labels of the layers of the run that the layers of the rehearsal stand for, in order."""
    rounds: tuple[LaunchLayout, ...] = ()
    """The launches that together have every kind of the layout."""
    changes: list[Change] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    """Choices per module that the kept layers cannot show, as sentences."""
    left_out: list[Finding] = field(default_factory=list)
    """Settings that no run on this machine can have, with the reason."""

    @property
    def shape(self) -> ModelShape:
        """The model of the run."""
        return self.plan.shape

    @property
    def tensor_ranks(self) -> int:
        """The tensor-parallel ranks of the rehearsal."""
        return self.layout.size("tensor")

    @property
    def model(self) -> dict[str, Any]:
        """The section of the model."""
        return self.sections["model"]

    @cached_property
    def unit(self) -> int:
        """The largest multiple that a scheme of the plan needs of a dimension."""
        largest = MIN_ALIGNMENT
        names = self.plan.schemes()
        for row in SCHEMES:
            if row.name in names and row.alignment:
                largest = max(largest, *row.alignment)
        return largest

    def set(self, path: str, value: Any, reason: str) -> None:
        """Give a setting another value, and note the change where it is one."""
        section, _, name = path.partition(".")
        if section == "mixed_precision":
            values = self.precision
        else:
            values = self.sections[section]
        if values is None:
            return
        before = values.get(name)
        if before == value:
            return
        if value is None:
            values.pop(name, None)
        else:
            values[name] = value
        self.note(path, before, value, reason)

    def note(self, path: str, before: Any, after: Any, reason: str) -> None:
        """Note a change."""
        self.changes.append(Change(field=path, before=before, after=after, reason=reason))

    def leave_out(self, name: str, reason: str) -> None:
        """Take a switch out of the precision and of every config, and note it where it was on."""
        sections = {"mixed_precision": self.precision or {}, **self.sections}
        for section, values in sections.items():
            if values.pop(name, None):
                self.note_left_out(f"{section}.{name}", True, reason)

    def note_left_out(self, path: str, value: Any, reason: str) -> None:
        """Note a setting that no run on this machine can have."""
        self.left_out.append(
            Finding(path=path, rule=reason, value=value, remedy="", severity="warning")
        )

    def fit_width(self, size: int, wanted: float, ranks: int = 1, small_ranks: int = 1) -> int:
        """Return a width near `wanted` whose part on a rank keeps the alignment of the run's width.

        Args:
            size: The width in the run.
            wanted: The width that would keep the ratio to the other widths.
            ranks: Ranks of the run that share the width.
            small_ranks: Ranks of the rehearsal that share the width.
        """
        if size % ranks:
            return small_ranks * self.unit + 1
        common = gcd(size // ranks, self.unit)
        part = max(1, round(wanted / small_ranks / self.unit)) * self.unit
        if common < self.unit:
            part += common
        return small_ranks * part
