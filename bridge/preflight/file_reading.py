"""`FileReading`: one file that describes a run, in our section names and Megatron's field names.

The readers of `bridge.read` make it. The type stands in this room, below theirs, since a `Run` has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bridge.errors import Finding
from bridge.precision.grouping import group_pairs
from bridge.preflight.launches import Launches
from bridge.preflight.megatron_release import MegatronRelease
from bridge.preflight.uncertainty import Uncertainty
from bridge.rules.program import DroppedField
from bridge.target.target import Target

PRECISION_BRIDGE = "Precision Bridge"
MEGATRON_BRIDGE = "Megatron Bridge"
MEGATRON_LM = "Megatron-LM"
MEGATRON_CORE = "Megatron Core"
"""The base of a framework that constructs Megatron Core's configs itself."""
MODE_REASON = "the mode of the run"
"""Reason of values that follow from the mode, whatever program starts the run."""
MICRO_BATCH_REASON = (
    "the tokens of a full micro batch: max_tokens_per_gpu x context_parallel_size, "
    "since samples are packed"
)
"""Reason of a length that is counted here and that no program sets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DerivedValue:
    """One value that a framework sets at the start of a run, over the one in the file."""

    path: str
    """Dotted key ("ddp.align_param_gather")."""
    value: Any
    """The value at the start."""
    stated: Any = None
    """The value in the file; None if it states none."""
    because: str = ""
    """The setting or the condition that the value follows from: "comm_overlap"."""
    set_by: str = ""
    """The framework that sets it; empty: the one that starts the run."""
    source: str = ""
    """The code in which a framework with a table sets it: file, function and commit."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        content = {
            "path": self.path,
            "value": self.value,
            "in_file": self.stated,
            "because": self.because,
        }
        if self.set_by:
            content["set_by"] = self.set_by
            content["source"] = self.source
        return content


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointModel:
    """How far the sizes of a model follow from the `config.json` of a checkpoint."""

    may_be_stated: bool = False
    """Whether `config.json` makes the model, so that the folder of a checkpoint may be stated."""
    no_sizes_reason: str | None = None
    """Why `config.json` gives no sizes, as a sentence. None: it gives them, or it is not read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionFaults:
    """Options of a run that its program refuses, drops, or gives to other modules."""

    refused: tuple[Finding, ...] = ()
    """Arguments of the command line that the program's parser refuses."""
    misdirected: tuple[Finding, ...] = ()
    """Options that the framework drops, or passes to other modules than their names say."""
    dropped_fields: tuple[DroppedField, ...] = ()
    """Fields of Megatron Core that the file states and the framework's code does not forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileReading:
    """One file that describes a run, as read, before overrides are written over its sections."""

    framework: str = PRECISION_BRIDGE
    """The framework that starts a run of this file."""
    underlying_framework: str = ""
    """The framework below it whose arguments or classes its settings are.

    Empty: the settings are those of `framework`.
    """
    sections: Mapping[str, Any] = field(default_factory=dict)
    """Our section and key names -> plain values with Megatron's field spellings.

    `mixed_precision` is among them.
    """
    origins: Mapping[str, str] = field(default_factory=dict)
    """Setting ("model.hidden_size") that another file states -> that file's name."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Dotted key of the file, or its beginning -> our key, if they differ.

    An override may be written with either.
    """
    trains_nothing: bool = False
    """Whether the run evaluates a checkpoint or generates text, without optimizer and gradients."""
    read_overrides: tuple[str, ...] = ()
    """Overrides of our command line that the reader wrote over the file's own keys."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the file sets."""
    derived: tuple[DerivedValue, ...] = ()
    """Values that the framework sets at start.

    They are in the sections of the `Run`, not in `sections`.
    """
    own_fields: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key of a field of the framework's own classes -> its value.

    Megatron Core does not have these fields.
    """
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Option of the engine that generates samples, which trains nothing -> its value."""
    notes: tuple[str, ...] = ()
    """Sentences about how the file was read, for example the other files that were read."""
    release: MegatronRelease = field(default_factory=MegatronRelease)
    """The release of Megatron Core that the file is of."""
    uncertainty: Uncertainty = field(default_factory=Uncertainty)
    """The settings that the file does not decide."""
    launches: Launches = field(default_factory=Launches)
    """The runs of the file, and which of them this is."""
    training_gpus: int | None = None
    """The number of GPUs that train, as the file states it. None: the file does not state it."""
    checkpoint_model: CheckpointModel = field(default_factory=CheckpointModel)
    """Whether a checkpoint decides the sizes of the model."""
    option_faults: OptionFaults = field(default_factory=OptionFaults)
    """Options without the effect that the file asks for."""
    added_schemes: tuple[str, ...] = ()
    """Scaling schemes that the framework adds to Megatron Core's, as values of `fp4_recipe`."""

    @property
    def settings_of(self) -> str:
        """The framework whose arguments or classes its settings are."""
        return self.underlying_framework or self.framework

    @property
    def mode_dependent_settings(self) -> frozenset[str]:
        """Settings set at start that follow from the mode, whatever the program does."""
        return frozenset(row.path for row in self.derived if row.because == MODE_REASON)

    @property
    def lines(self) -> tuple[str, ...]:
        """The notes of an answer on the file, as sentences.

        They are about the release, the values set at start, the files read, the open settings and
        the other runs of the file.
        """
        return (
            self.release.sentence,
            *self._describe_start_values(),
            *self.notes,
            *self.uncertainty.sentences,
            *self.launches.sentences,
        )

    def _describe_start_values(self) -> list[str]:
        """Return a sentence for each reason, about the values that the framework sets at start."""
        reasons = []
        for row in self.derived:
            reasons.append(
                ((row.set_by, row.because, self._is_assumed(row)), f"{row.path}={row.value}")
            )
        sentences = []
        for (set_by, reason, is_assumed), values in group_pairs(reasons).items():
            if reason == MODE_REASON and self.uncertainty.mode_decider is not None:
                continue
            framework = set_by or self.settings_of
            settings = f"{', '.join(values)} ({reason})."
            if reason == MICRO_BATCH_REASON:
                sentences.append(f"Counted here: {settings}")
            elif is_assumed:
                sentences.append(f"Assumed, as {framework} sets it at start: {settings}")
            else:
                sentences.append(f"{framework} sets at start: {settings}")
        return sentences

    def _is_assumed(self, row: DerivedValue) -> bool:
        """Return whether another program than the one that sets a value at start may decide it.

        A source that is not read may decide a setting in the place of Megatron-LM's parser: a
        framework whose model is not made of its arguments.
        """
        if row.because == MODE_REASON:
            return False
        is_of_parser = self.settings_of == MEGATRON_LM and not row.set_by
        if is_of_parser and row.path in self.uncertainty.unread_sources:
            return True
        return self.uncertainty.default_decider is not None

    def to_dict(self) -> dict[str, Any]:
        """Return the notes of an answer on the file as plain data."""
        release = None
        if self.release.version is not None:
            release = str(self.release.version)
        run = None
        if self.launches.labels:
            run = {"number": self.launches.number, "of": list(self.launches.labels)}
        return {
            "framework": self.framework,
            "megatron_core": release,
            "because": self.release.reason,
            "set_at_start": [row.to_dict() for row in self.derived],
            "read_too": list(self.notes),
            "open": list(self.uncertainty.sentences),
            "unplanned": self.uncertainty.no_plan_reason,
            "uncounted": list(self.uncertainty.unread_options),
            "generation": dict(self.generation),
            "dropped": [dropped.to_dict() for dropped in self.option_faults.dropped_fields],
            "mode_decided_by": self.uncertainty.mode_decider,
            "run": run,
        }

    def with_target_release(self, target: Target, *, is_stated: bool) -> FileReading:
        """Return the reading with the release of the target if the file states none.

        Args:
            target: The target of the run, with the installed releases if it states none.
            is_stated: Whether the run states its target.
        """
        return replace(self, release=self.release.or_of_target(target, is_stated=is_stated))

    def with_rehearsed_release(self, version: str) -> FileReading:
        """Return the reading with the release that a rehearsal imported.

        A release that a target or the file states stays.
        """
        return replace(self, release=self.release.or_rehearsed(version))

    def with_notes(self, *sentences: str) -> FileReading:
        """Return the reading with further notes after the notes so far."""
        return replace(self, notes=(*self.notes, *sentences))

    def with_first_note(self, sentence: str) -> FileReading:
        """Return the reading with a further note before the notes so far."""
        return replace(self, notes=(sentence, *self.notes))

    def describe_dropped(self, path: str) -> tuple[str, ...]:
        """Return a sentence for each key of the file that states a setting without reaching it."""
        sentences = []
        for dropped in self.option_faults.dropped_fields:
            if dropped.path == path:
                key = f"{dropped.key}={dropped.value}"
                sentences.append(f"{dropped.framework} does not forward {key}.")
        return tuple(sentences)

    def translate_key(self, key: str) -> str:
        """Return our name of a dotted key that may be written with the file's names."""
        for theirs, ours in self.names.items():
            if key == theirs or key.startswith(f"{theirs}."):
                return ours + key[len(theirs) :]
        return key
