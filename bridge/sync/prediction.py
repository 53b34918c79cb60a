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
from bridge.model.layout import ParallelLayout, read_parallel_layout
from bridge.model.read_tracking import TrackedValues, note_read, tracked_property
from bridge.model.section import SECTION_NAMES, Section, read_section
from bridge.model.shape import ModelShape, read_shape
from bridge.precision.config import PrecisionConfig
from bridge.rules.sync_row import SyncRow
from bridge.sync.owner import OwnerValues, get_values_before_sync, unwrap_config
from bridge.sync.sync_plan import plan_sync
from bridge.target.fields import OWNER_DEFAULTS
from bridge.target.target import Target

if TYPE_CHECKING:
    from bridge.precision.debug_features import DebugFeatures

SYNCED_SECTIONS = ("model", "optimizer", "ddp", "train")
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
    no_plan_reason: str | None = None
    """Why the run has no plan, as a sentence: a source of its layers or precision is not read."""
    uncounted: tuple[str, ...] = ()
    """Options of the run that are not read, and may bear on its layout, its layers or its bytes."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables of the run, as far as they are known."""
    features: DebugFeatures | None = None
    """The features of Transformer Engine's debugger; None: it is off."""

    def with_precision(self, precision: PrecisionConfig | None) -> Prediction:
        """Return the same run in another precision."""
        return self._predicted(precision, self.sections, self.target)

    def with_target(self, target: Target) -> Prediction:
        """Return the same run on another target."""
        return self._predicted(self.precision, self.sections, target)

    def _predicted(
        self, precision: PrecisionConfig | None, sections: Mapping[str, Section], target: Target
    ) -> Prediction:
        """Return the same run with another precision, other sections or another target."""
        return replace(
            _predict_sync(precision, sections, target),
            no_plan_reason=self.no_plan_reason,
            uncounted=self.uncounted,
            environment=self.environment,
            features=self.features,
        )

    def require_plan(self) -> None:
        """Raise a RunConfigError where a source of the layers or their precision is not read."""
        if self.no_plan_reason is not None:
            note_read("model.num_layers")
            raise RunConfigError(self.no_plan_reason)

    def with_values(self, changes: Mapping[str, Any]) -> Prediction:
        """Return the run with other values of some settings.

        Args:
            changes: section.field -> value in the form of a plan (`normalise_value`).
        """
        sections = dict(self.sections)
        for path, value in changes.items():
            role, _, name = path.partition(".")
            sections[role] = sections[role].with_values({name: value})
        return self._predicted(self.precision, sections, self.target)

    @tracked_property
    def absent(self) -> Mapping[str, Mapping[str, str]]:
        """Section -> fields that are set and that this Megatron Core does not have.

        Each field has the versions that have it.
        """
        absent = {}
        for role in SYNCED_SECTIONS:
            absent[role] = self.sections[role].find_absent_fields(role, self.target.mcore)
        return absent

    @tracked_property
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
        return section.with_values(of_data)

    @tracked_property
    def shape_and_faults(self) -> tuple[ModelShape, tuple[Finding, ...]]:
        """The model, and every reason why it has no plan."""
        return read_shape(self.model)

    @tracked_property
    def layout_and_faults(self) -> tuple[ParallelLayout, tuple[Finding, ...]]:
        """The layout on as few GPUs as it needs, and every reason why the settings have no layout."""
        return read_parallel_layout(self.model)

    @property
    def shape(self) -> ModelShape:
        """The model; RunConfigError with every reason why it has no plan."""
        self.require_plan()
        shape, faults = self.shape_and_faults
        if faults:
            raise RunConfigError("\n".join(map(str, faults)))
        return shape

    @property
    def layout(self) -> ParallelLayout:
        """The layout on as few GPUs as it needs; RunConfigError where the settings have no layout."""
        layout, faults = self.layout_and_faults
        if faults:
            raise RunConfigError(str(faults[0]))
        return layout

    @tracked_property
    def parallel(self) -> ParallelLayout:
        """The layout on the GPUs of the target, or on the next number that it fills; it raises as `layout`."""
        return self.layout.fit_to_world_size(self.target.count)

    def read(self, role: str) -> dict[str, Any]:
        """Return a section's values after the sync, those of absent fields at their defaults."""
        if not self.absent[role]:
            return self.values[role]
        values = {**self.values[role]}
        for name in self.absent[role]:
            values[name] = OWNER_DEFAULTS[role][name]
        return values


def predict(
    precision: PrecisionConfig | None,
    sections: Mapping[str, Any],
    *,
    target: Target | None = None,
    no_plan_reason: str | None = None,
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
        no_plan_reason: Why the run has no plan, as a sentence; None: it has one.
        uncounted: Options of the run that are not read, and may bear on its layout, its layers or
            its bytes.
        environment: Environment variables of the run; None: not known.
    """
    unknown = sections.keys() - {*SECTION_NAMES}
    if unknown:
        raise TypeError(
            f"a run has the sections {', '.join(SECTION_NAMES)}, and not {', '.join(sorted(unknown))}"
        )
    is_synced = precision is not None
    in_one_form = {}
    for role in SECTION_NAMES:
        in_one_form[role] = _read_owner_section(role, sections.get(role), is_synced=is_synced)
    return replace(
        _predict_sync(precision, in_one_form, target or Target()),
        no_plan_reason=no_plan_reason,
        uncounted=uncounted,
        environment=environment or {},
    )


def _read_owner_section(role: str, owner: Any, *, is_synced: bool) -> Section:
    """Return an owner as a section; under a precision, with its values before any sync."""
    if owner is None or isinstance(owner, Mapping | Section):
        return read_section(role, owner)
    config = unwrap_config(owner)
    if is_synced:
        return read_section(role, config, get_values_before_sync(role, config))
    return read_section(role, config, None)


def _predict_sync(
    precision: PrecisionConfig | None, sections: Mapping[str, Section], target: Target
) -> Prediction:
    """Return the prediction of a run by the plan of its sync."""
    values: dict[str, dict[str, Any]] = {}
    for role, section in sections.items():
        values[role] = TrackedValues(role, section.values)
    owners = []
    for role in SYNCED_SECTIONS:
        owners.append(OwnerValues.from_section(role, sections[role], target.mcore))
    rows: list[SyncRow] = []
    if precision is not None:
        rows = plan_sync(precision, owners, is_last=True)
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
