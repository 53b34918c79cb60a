"""`predict`: the values of every section of a run after the last sync before it, and where they come from.

    prediction = predict(config, {"model": {"num_layers": 80}, "ddp": {}}, target=Target(mcore=Version("0.18")))
    prediction.values["model"]["bf16"], prediction.shape.kinds, prediction.parallel.tensor

It is pure, and made once a command. The plan of the sync itself says what is written. Rules, plan, memory, alignment
and rehearsal ask the prediction, and nothing else foresees a sync.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bridge.errors import Finding, RunConfigError
from bridge.precision.config import PrecisionConfig
from bridge.rules.fields import DEFAULTS
from bridge.rules.section import ROLES, Section, read_section
from bridge.rules.shape.model import ModelShape, read_shape
from bridge.rules.shape.parallel import Parallel, read_parallel
from bridge.rules.target import Target
from bridge.sync.owner import OwnerValues, own_values, seen_through
from bridge.sync.plan import plan
from bridge.sync.report import SyncRow

OWNERS = ("model", "optimizer", "ddp", "train")
"""The sections that a sync writes into."""
Origins = Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A run before it is built, as the last sync leaves it."""

    precision: PrecisionConfig | None
    """The precision that is written into the sections; None: they keep their own settings."""
    sections: Mapping[str, Section]
    """Every section of `ROLES` as it was given."""
    target: Target
    origins: Origins | None = None
    """Path of a setting -> its source."""
    owners: tuple[OwnerValues, ...]
    """The values that the plan starts from."""
    rows: tuple[SyncRow, ...]
    """The plan of the sync."""
    values: Mapping[str, dict[str, Any]]
    """Section -> field -> value after the sync."""

    def is_of(self, precision: PrecisionConfig, owners: Sequence[OwnerValues]) -> bool:
        """Return whether the plan is that of a sync of this precision into these owners."""
        return self.precision is precision and [*self.owners] == [*owners]

    def under(self, precision: PrecisionConfig | None) -> Prediction:
        """Return the same run in another precision."""
        return _predicted(precision, self.sections, self.target, self.origins)

    def on(self, target: Target) -> Prediction:
        """Return the same run on another target."""
        return _predicted(self.precision, self.sections, target, self.origins)

    def changed(self, changes: Mapping[str, Any]) -> Prediction:
        """Return the run with other values of some settings, by section.field, in their one form."""
        sections = dict(self.sections)
        for path, value in changes.items():
            role, _, name = path.partition(".")
            sections[role] = sections[role].changed({name: value})
        return _predicted(self.precision, sections, self.target, self.origins)

    @cached_property
    def absent(self) -> Mapping[str, Mapping[str, str]]:
        """Section -> fields that are set and that this Megatron Core does not have -> the versions that have them."""
        return {role: self.sections[role].absent_from(role, self.target.mcore) for role in OWNERS}

    @cached_property
    def model(self) -> Section:
        """The model that this Megatron Core builds: a field that it does not have counts as not set.

        Vocabulary and sequence length are the model's, or else those of the data.
        """
        section, data = self.sections["model"].without("model", self.absent["model"]), self.sections["data"].values
        of_data = {name: data[name] for name in ("vocab_size", "seq_length") if section.given(name) is None}
        return section.changed({name: value for name, value in of_data.items() if value is not None})

    @cached_property
    def shape_and_faults(self) -> tuple[ModelShape, tuple[Finding, ...]]:
        """The model, and every reason why there is none, or no plan of it."""
        return read_shape(self.model)

    @cached_property
    def layout_and_faults(self) -> tuple[Parallel, tuple[Finding, ...]]:
        """The layout on as few GPUs as it needs, and every reason why there is none."""
        return read_parallel(self.model)

    @property
    def shape(self) -> ModelShape:
        """The model; RunConfigError with every reason why there is none, or no plan of it."""
        shape, faults = self.shape_and_faults
        if faults:
            raise RunConfigError("\n".join(map(str, faults)))
        return shape

    @property
    def layout(self) -> Parallel:
        """The layout on as few GPUs as it needs; RunConfigError where there is none."""
        layout, faults = self.layout_and_faults
        if faults:
            raise RunConfigError(str(faults[0]))
        return layout

    @cached_property
    def parallel(self) -> Parallel:
        """The layout on the GPUs of the target, or on the next number that it fills; RunConfigError for none."""
        return self.layout.on_enough(self.target.count)

    def read(self, role: str) -> dict[str, Any]:
        """Return the values of a section after the sync, those of absent fields at their defaults."""
        if not self.absent[role]:
            return self.values[role]
        return {**self.values[role], **{name: DEFAULTS[role][name] for name in self.absent[role]}}


def predict(
    precision: PrecisionConfig | None,
    given: Mapping[str, Any],
    *,
    target: Target | None = None,
    origins: Origins | None = None,
) -> Prediction:
    """Return a run as the last sync before it leaves it.

    Args:
        precision: The precision that is written into the sections; None: they keep their own settings.
        given: Section -> Megatron's object, a mapping of its fields, or a `Section`; one that is absent has Megatron's
            defaults. An object that a sync has written to counts with the values that it had before.
        target: The GPUs and versions of the run; without a version of megatron-core every field is there.
        origins: Path of a setting -> its source.
    """
    unknown = given.keys() - {*ROLES}
    if unknown:
        raise TypeError(f"a run has the sections {', '.join(ROLES)}, and not {', '.join(sorted(unknown))}")
    sections = {role: _section(role, given.get(role), is_synced=precision is not None) for role in ROLES}
    return _predicted(precision, sections, target or Target(), origins)


def _section(role: str, owner: Any, *, is_synced: bool) -> Section:
    if owner is None or isinstance(owner, Mapping | Section):
        return read_section(role, owner)
    held = seen_through(owner)
    return read_section(role, held, own_values(role, held) if is_synced else None)


def _predicted(
    precision: PrecisionConfig | None, sections: Mapping[str, Section], target: Target, origins: Origins | None
) -> Prediction:
    values = {role: dict(section.values) for role, section in sections.items()}
    owners = tuple(OwnerValues.of_section(role, sections[role], target.mcore) for role in OWNERS)
    rows = tuple(plan(precision, owners, is_last=True)) if precision is not None else ()
    for row in rows:
        if row.verdict != "absent":
            values[row.owner][row.attribute] = row.new
    return Prediction(
        precision=precision,
        sections=sections,
        target=target,
        origins=origins,
        owners=owners,
        rows=rows,
        values=values,
    )
