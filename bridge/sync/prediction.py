"""`predict`: a run before it is built, as the last sync leaves it.

    prediction = predict(
        config, {"model": {"num_layers": 80}, "ddp": {}}, target=Target(mcore=Version("0.18"))
    )
    prediction.values["model"]["bf16"], prediction.shape.kinds, prediction.parallel.tensor

It is pure: nothing is written. A prediction is made once a command. Rules, plan, memory,
alignment, rehearsal and the run's own sync ask it, and nothing else foresees a sync.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bridge.errors import Finding, RunConfigError
from bridge.model.layout import Parallel, read_parallel
from bridge.model.reads import Values, kept_property, note
from bridge.model.section import ROLES, Section, read_section
from bridge.model.shape import ModelShape, read_shape
from bridge.precision.config import PrecisionConfig
from bridge.rules.sync_row import SyncRow
from bridge.sync.owner import OwnerValues, own_values, seen_through
from bridge.sync.plan import plan
from bridge.target.fields import DEFAULTS
from bridge.target.target import Target

if TYPE_CHECKING:
    from bridge.precision.debug_features import DebugFeatures

WRITTEN_INTO = ("model", "optimizer", "ddp", "train")
"""The sections that a sync writes into."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A run before it is built, as the last sync leaves it."""

    precision: PrecisionConfig | None
    """The precision that is written into the sections; None: they keep their own settings."""
    sections: Mapping[str, Section]
    """Every section of `ROLES`, before the sync."""
    target: Target
    owners: tuple[OwnerValues, ...]
    """The values that the plan starts from."""
    rows: tuple[SyncRow, ...]
    """The plan of the sync."""
    values: Mapping[str, dict[str, Any]]
    """Section -> field -> value after the sync."""
    unplanned: str | None = None
    """Why the run has no plan, as a sentence: a source of its layers or precision is not read."""
    uncounted: tuple[str, ...] = ()
    """Options of the run that are not read, and may bear on its layout, its layers or its bytes."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables of the run, as far as they are known."""
    features: DebugFeatures | None = None
    """The features of Transformer Engine's debugger; None: it is off."""

    def under(self, precision: PrecisionConfig | None) -> Prediction:
        """Return the same run in another precision."""
        return self._predicted(precision, self.sections, self.target)

    def on(self, target: Target) -> Prediction:
        """Return the same run on another target."""
        return self._predicted(self.precision, self.sections, target)

    def _predicted(
        self, precision: PrecisionConfig | None, sections: Mapping[str, Section], target: Target
    ) -> Prediction:
        """Return the same run with another precision, other sections or another target."""
        return replace(
            _predicted(precision, sections, target),
            unplanned=self.unplanned,
            uncounted=self.uncounted,
            environment=self.environment,
            features=self.features,
        )

    def refuse_unplanned(self) -> None:
        """Raise a RunConfigError where a source of the layers or their precision is not read."""
        if self.unplanned is not None:
            note("model.num_layers")
            raise RunConfigError(self.unplanned)

    def changed(self, changes: Mapping[str, Any]) -> Prediction:
        """Return the run with other values of some settings.

        Args:
            changes: section.field -> value in the form of a plan (`in_one_form`).
        """
        sections = dict(self.sections)
        for path, value in changes.items():
            role, _, name = path.partition(".")
            sections[role] = sections[role].changed({name: value})
        return self._predicted(self.precision, sections, self.target)

    @kept_property
    def absent(self) -> Mapping[str, Mapping[str, str]]:
        """Section -> fields that are set and that this Megatron Core does not have.

        Each field has the versions that have it.
        """
        absent = {}
        for role in WRITTEN_INTO:
            absent[role] = self.sections[role].absent_from(role, self.target.mcore)
        return absent

    @kept_property
    def model(self) -> Section:
        """The model that this Megatron Core builds: a field that it lacks counts as not set.

        Vocabulary and sequence length are the model's, or else those of the data.
        """
        section = self.sections["model"].without("model", self.absent["model"])
        data = self.sections["data"].values
        of_data = {}
        for name in ("vocab_size", "seq_length"):
            if section.given(name) is None:
                value = data[name]
                if value is not None:
                    of_data[name] = value
        return section.changed(of_data)

    @kept_property
    def shape_and_faults(self) -> tuple[ModelShape, tuple[Finding, ...]]:
        """The model, and every reason why it has no plan."""
        return read_shape(self.model)

    @kept_property
    def layout_and_faults(self) -> tuple[Parallel, tuple[Finding, ...]]:
        """The layout on as few GPUs as it needs, and every reason why the settings have no layout."""
        return read_parallel(self.model)

    @property
    def shape(self) -> ModelShape:
        """The model; RunConfigError with every reason why it has no plan."""
        self.refuse_unplanned()
        shape, faults = self.shape_and_faults
        if faults:
            raise RunConfigError("\n".join(map(str, faults)))
        return shape

    @property
    def layout(self) -> Parallel:
        """The layout on as few GPUs as it needs; RunConfigError where the settings have no layout."""
        layout, faults = self.layout_and_faults
        if faults:
            raise RunConfigError(str(faults[0]))
        return layout

    @kept_property
    def parallel(self) -> Parallel:
        """The layout on the GPUs of the target, or on the next number that it fills; it raises as `layout`."""
        return self.layout.on_enough(self.target.count)

    def read(self, role: str) -> dict[str, Any]:
        """Return a section's values after the sync, those of absent fields at their defaults."""
        if not self.absent[role]:
            return self.values[role]
        values = {**self.values[role]}
        for name in self.absent[role]:
            values[name] = DEFAULTS[role][name]
        return values


def predict(
    precision: PrecisionConfig | None,
    sections: Mapping[str, Any],
    *,
    target: Target | None = None,
    unplanned: str | None = None,
    uncounted: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Prediction:
    """Return a run as the last sync before it leaves it.

    Args:
        precision: The precision that is written into the sections; None: they keep their own
            settings.
        sections: Section -> Megatron's object, a mapping of its fields, or a `Section`. An absent
            section has Megatron's defaults. An object that a sync has written to counts with the
            values that it had before.
        target: The GPUs and versions of the run; without a version of megatron-core every field is
            there.
        unplanned: Why the run has no plan, as a sentence; None: it has one.
        uncounted: Options of the run that are not read, and may bear on its layout, its layers or
            its bytes.
        environment: Environment variables of the run; None: not known.
    """
    unknown = sections.keys() - {*ROLES}
    if unknown:
        raise TypeError(
            f"a run has the sections {', '.join(ROLES)}, and not {', '.join(sorted(unknown))}"
        )
    is_synced = precision is not None
    in_one_form = {}
    for role in ROLES:
        in_one_form[role] = _section(role, sections.get(role), is_synced=is_synced)
    return replace(
        _predicted(precision, in_one_form, target or Target()),
        unplanned=unplanned,
        uncounted=uncounted,
        environment=environment or {},
    )


def _section(role: str, owner: Any, *, is_synced: bool) -> Section:
    """Return an owner as a section; under a precision, with its values before any sync."""
    if owner is None or isinstance(owner, Mapping | Section):
        return read_section(role, owner)
    config = seen_through(owner)
    if is_synced:
        return read_section(role, config, own_values(role, config))
    return read_section(role, config, None)


def _predicted(
    precision: PrecisionConfig | None, sections: Mapping[str, Section], target: Target
) -> Prediction:
    """Return the prediction of a run by the plan of its sync."""
    values: dict[str, dict[str, Any]] = {}
    for role, section in sections.items():
        values[role] = Values(role, section.values)
    owners = []
    for role in WRITTEN_INTO:
        owners.append(OwnerValues.of_section(role, sections[role], target.mcore))
    rows: list[SyncRow] = []
    if precision is not None:
        rows = plan(precision, owners, is_last=True)
    for row in rows:
        if row.verdict != "absent":
            values[row.owner][row.attribute] = row.new
    return Prediction(
        precision=precision,
        sections=sections,
        target=target,
        owners=tuple(owners),
        rows=tuple(rows),
        values=values,
    )
