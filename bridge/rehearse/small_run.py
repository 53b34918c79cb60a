"""`SmallRun`: the small copy of a run that a rehearsal launches. Each change has a reason."""

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
"""Multiple of widths if no scheme needs a larger multiple.

Tensor cores and Transformer Engine's FP8 GEMMs need it.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A setting that has another value in the rehearsal than in the run."""

    field: str
    """section.field."""
    before: Any
    after: Any
    reason: str
    """The reason for the new value, without a full stop."""


@dataclass(kw_only=True)
class SmallRun:
    """The small copy of a run, together with the plan of the full run.

    The functions of `shrink` change it step by step. Three lists record the changes: `changes`,
    `left_out` and `unshown_choices`.
    """

    sections: dict[str, dict[str, Any]]
    """model, optimizer, ddp and train, for one process."""
    precision: dict[str, Any] | None
    """The stated fields of the precision. None if only the configs decide it."""
    plan: PrecisionPlan
    """The plan of the full run."""
    parallel: ParallelLayout
    """The parallel layout of the full run."""
    layout: LaunchLayout
    """Every kind of parallelism of the full run, each at size 2."""
    layers: tuple[str, ...] = ()
    """Labels of the layers of the full run that the rehearsal keeps, in order."""
    launches: tuple[LaunchLayout, ...] = ()
    """The launches that together have every kind of parallelism of `layout`."""
    changes: list[Change] = field(default_factory=list)
    """Settings with another value."""
    left_out: list[Finding] = field(default_factory=list)
    """Settings that no run on this machine can have, with the reason."""
    unshown_choices: list[str] = field(default_factory=list)
    """Choices per module that the kept layers cannot show, as sentences."""

    @property
    def shape(self) -> ModelShape:
        """The model of the full run."""
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
    def alignment(self) -> int:
        """The largest multiple that a scheme of the plan needs of a dimension."""
        largest = MIN_ALIGNMENT
        names = self.plan.schemes()
        for row in SCHEMES:
            if row.name in names and row.alignment:
                largest = max(largest, *row.alignment)
        return largest

    def set(self, path: str, value: Any, reason: str) -> None:
        """Set a setting, and record the change if the value is another one.

        Args:
            path: section.field. The section mixed_precision is skipped if the run has none.
            value: The new value. None removes the setting.
            reason: The reason for the change, without a full stop.
        """
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
        self.record_change(path, before, value, reason)

    def record_change(self, path: str, before: Any, after: Any, reason: str) -> None:
        """Record a changed setting."""
        self.changes.append(Change(field=path, before=before, after=after, reason=reason))

    def remove_switch(self, name: str, reason: str) -> None:
        """Remove a switch from the precision and from every config.

        It is recorded as left out wherever it was on.
        """
        sections = {"mixed_precision": self.precision or {}, **self.sections}
        for section, values in sections.items():
            if values.pop(name, None):
                self.record_left_out(f"{section}.{name}", True, reason)

    def record_left_out(self, path: str, value: Any, reason: str) -> None:
        """Record a setting that no run on this machine can have."""
        self.left_out.append(
            Finding(path=path, rule=reason, value=value, remedy="", severity="warning")
        )

    def fit_width(self, size: int, wanted: float, ranks: int = 1, small_ranks: int = 1) -> int:
        """Return a small width that is aligned on a rank exactly as the width of the full run is.

        Args:
            size: The width in the full run.
            wanted: The width that would keep the ratio to the other widths. The result is near it.
            ranks: Ranks of the full run that share the width.
            small_ranks: Ranks of the rehearsal that share the width.
        """
        if size % ranks:
            # As in the full run, the ranks do not divide this width. So Megatron refuses it too.
            return small_ranks * self.alignment + 1
        common = gcd(size // ranks, self.alignment)
        part = max(1, round(wanted / small_ranks / self.alignment)) * self.alignment
        if common < self.alignment:
            # The greatest common divisor with the alignment must be `common` again.
            part += common
        return small_ranks * part
