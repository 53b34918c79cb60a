"""`predict`: a run before it is built, as the last sync leaves it.

    prediction = predict(
        config, {"model": {"num_layers": 80}, "ddp": {}}, target=Target(mcore=Version("0.18"))
    )
    prediction.values["model"]["bf16"], prediction.shape.kinds, prediction.parallel.tensor

A prediction writes nothing. A command makes it once. The rules, the plan, the memory report, the
alignment, the rehearsal and the sync of the run all read it. No other code predicts a sync.
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
from bridge.model.shape import ModelShape
from bridge.model.shape_reader import read_shape
from bridge.precision.owners import ConfigObject
from bridge.precision.precision_config import PrecisionConfig
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
    """The precision that is written into the sections. None: they keep their settings."""
    sections: Mapping[str, Section]
    """Every section of `SECTION_NAMES`, before the sync."""
    target: Target
    owner_values: tuple[OwnerValues, ...]
    """The values of the synced sections before the sync."""
    rows: tuple[SyncRow, ...]
    """The plan of the sync."""
    values: Mapping[str, dict[str, Any]]
    """Section -> field -> value after the sync."""
    no_plan_reason: str | None = None
    """The reason why the run has no plan. None: the run has a plan.

    A run has no plan if a source of its layers or of its precision is not read.
    """
    unread_options: tuple[str, ...] = ()
    """Options of the run that are not read and may affect its layout, its layers or its memory."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The known environment variables of the run."""
    file_gpus: int | None = None
    """The number of GPUs that the file of the run states. It counts if the target states none."""
    has_assumed_release: bool = False
    """Whether nothing states the release of Megatron Core, and the newest known one is taken."""
    features: DebugFeatures | None = None
    """The features of Transformer Engine's debugger. None: the debugger is off."""

    def with_precision(self, precision: PrecisionConfig | None) -> Prediction:
        """Return the same run in another precision."""
        return self._predict_again(precision, self.sections, self.target)

    def with_target(self, target: Target) -> Prediction:
        """Return the same run on another target."""
        return self._predict_again(self.precision, self.sections, target)

    def _predict_again(
        self, precision: PrecisionConfig | None, sections: Mapping[str, Section], target: Target
    ) -> Prediction:
        """Return the same run with another precision, other sections or another target."""
        return replace(
            _predict_sync(precision, sections, target),
            no_plan_reason=self.no_plan_reason,
            unread_options=self.unread_options,
            environment=self.environment,
            file_gpus=self.file_gpus,
            has_assumed_release=self.has_assumed_release,
            features=self.features,
        )

    def require_plan(self) -> None:
        """Raise a RunConfigError if a source of the layers or of their precision is not read."""
        if self.no_plan_reason is not None:
            # A rule that fails here depends on the model. Its finding must say so.
            note_read("model.num_layers")
            raise RunConfigError(self.no_plan_reason)

    def with_values(self, changes: Mapping[str, Any]) -> Prediction:
        """Return the run with other values of some settings.

        Args:
            changes: section.field -> value, normalised as by `normalise_value`.
        """
        sections = dict(self.sections)
        for path, value in changes.items():
            section_name, _, name = path.partition(".")
            sections[section_name] = sections[section_name].with_values({name: value})
        return self._predict_again(self.precision, sections, self.target)

    @tracked_property
    def absent(self) -> Mapping[str, Mapping[str, str]]:
        """Section -> field that is set and that this Megatron Core lacks -> the versions with it."""
        absent = {}
        for section_name in SYNCED_SECTIONS:
            absent[section_name] = self.sections[section_name].find_absent_fields(
                section_name, self.target.mcore
            )
        return absent

    @tracked_property
    def model(self) -> Section:
        """The model that this Megatron Core builds. A field that it lacks counts as not set.

        Vocabulary size and sequence length come from the data section if the model does not state
        them.
        """
        section = self.sections["model"].with_defaults("model", self.absent["model"])
        data = self.sections["data"].values
        data_values = {}
        for name in ("vocab_size", "seq_length"):
            if section.get_stated(name) is None:
                value = data[name]
                if value is not None:
                    data_values[name] = value
        return section.with_values(data_values)

    @tracked_property
    def shape_and_faults(self) -> tuple[ModelShape, tuple[Finding, ...]]:
        """The shape of the model, and every reason why it has no plan."""
        return read_shape(self.model)

    @tracked_property
    def layout_and_faults(self) -> tuple[ParallelLayout, tuple[Finding, ...]]:
        """The layout on the fewest GPUs, and every reason why the settings have no layout."""
        return read_parallel_layout(self.model)

    @property
    def shape(self) -> ModelShape:
        """The shape of the model.

        Raises:
            RunConfigError: The model has no plan. The error has every reason.
        """
        self.require_plan()
        shape, faults = self.shape_and_faults
        if faults:
            raise RunConfigError("\n".join(map(str, faults)))
        return shape

    @property
    def layout(self) -> ParallelLayout:
        """The layout on the fewest GPUs.

        Raises:
            RunConfigError: The settings have no layout.
        """
        layout, faults = self.layout_and_faults
        if faults:
            raise RunConfigError(str(faults[0]))
        return layout

    @tracked_property
    def parallel(self) -> ParallelLayout:
        """The layout on the stated number of GPUs, or on the next number of GPUs that it fills.

        Raises:
            RunConfigError: The settings have no layout.
        """
        return self.layout.fit_to_world_size(self.gpus)

    @property
    def gpus(self) -> int | None:
        """The number of GPUs that the target states, or else the file. None: neither states it."""
        return self.target.count or self.file_gpus

    def read(self, section_name: str) -> dict[str, Any]:
        """Return a section's values after the sync, with absent fields at their defaults."""
        if not self.absent[section_name]:
            return self.values[section_name]
        values = {**self.values[section_name]}
        for name in self.absent[section_name]:
            values[name] = OWNER_DEFAULTS[section_name][name]
        return values


def predict(
    precision: PrecisionConfig | None,
    sections: Mapping[str, Any],
    *,
    target: Target | None = None,
    no_plan_reason: str | None = None,
    unread_options: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Prediction:
    """Return a run with the values that it has after its last sync.

    Args:
        precision: The precision that is written into the sections. None: they keep their settings.
        sections: Section -> Megatron's object, a mapping of its fields, or a `Section`. A section
            that is missing has Megatron's defaults. If a sync has written into an object, its
            values before that sync are read.
        target: The GPUs and versions of the run. Without a version of megatron-core every field
            is known to it.
        no_plan_reason: A sentence about why the run has no plan. None: it has a plan.
        unread_options: Options of the run that are not read and may affect its layout, its layers or
            its memory.
        environment: Environment variables of the run. None: they are not known.

    Raises:
        TypeError: A section has an unknown name.
    """
    unknown = sections.keys() - {*SECTION_NAMES}
    if unknown:
        raise TypeError(
            f"a run has the sections {', '.join(SECTION_NAMES)}, and not {', '.join(sorted(unknown))}"
        )
    is_synced = precision is not None
    read_sections = {}
    for section_name in SECTION_NAMES:
        read_sections[section_name] = _read_owner_section(
            section_name, sections.get(section_name), is_synced=is_synced
        )
    return replace(
        _predict_sync(precision, read_sections, target or Target()),
        no_plan_reason=no_plan_reason,
        unread_options=unread_options,
        environment=environment or {},
    )


def _read_owner_section(
    section_name: str, owner: ConfigObject | None, *, is_synced: bool
) -> Section:
    """Return the values of an owner as a section.

    If a precision is to be written, they are the values before the first sync.
    """
    if owner is None or isinstance(owner, Mapping | Section):
        return read_section(section_name, owner)
    config = unwrap_config(owner)
    if is_synced:
        return read_section(section_name, config, get_values_before_sync(section_name, config))
    return read_section(section_name, config, None)


def _predict_sync(
    precision: PrecisionConfig | None, sections: Mapping[str, Section], target: Target
) -> Prediction:
    """Plan the sync of a run, and return the prediction with the values after it."""
    values: dict[str, dict[str, Any]] = {}
    for section_name, section in sections.items():
        values[section_name] = TrackedValues(section_name, section.values)
    owner_values = []
    for section_name in SYNCED_SECTIONS:
        owner_values.append(
            OwnerValues.from_section(section_name, sections[section_name], target.mcore)
        )
    rows: list[SyncRow] = []
    if precision is not None:
        rows = plan_sync(precision, owner_values, is_last=True)
    for row in rows:
        if row.verdict != "absent":
            values[row.owner][row.attribute] = row.new
    return Prediction(
        precision=precision,
        sections=sections,
        target=target,
        owner_values=tuple(owner_values),
        rows=tuple(rows),
        values=values,
    )
