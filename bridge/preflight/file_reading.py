"""`FileReading`: what one file says of a run, in our section names and Megatron's field names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bridge.errors import Finding, RunConfigError
from bridge.precision.grouping import group_pairs
from bridge.rules.program import DroppedField
from bridge.target.target import Target
from bridge.target.versions import Version, find_newer_megatron, parse_version

PRECISION_BRIDGE = "Precision Bridge"
MEGATRON_BRIDGE = "Megatron Bridge"
MEGATRON_LM = "Megatron-LM"
MEGATRON_CORE = "Megatron Core"
"""Whose settings the files of a framework have that makes the configs itself."""
NEWEST_ASSUMED = "assumed: no release is read from the file, and this is the newest known one"
"""Reason of a release that is assumed."""
INSTALLED_HERE = "installed here"
"""Reason of the installed release, where no target states one and no newer one is at hand."""
INSTALLED_FOR_OPEN_FILE = "installed here, as the file leaves it open"
"""The same, of a file whose fields several releases have."""
OF_THIS_MACHINE = "of this machine, which is the target"
NONE_INSTALLED = "none is installed here, and no target states one"
NONE_INSTALLED_NEWER_LOCAL = (
    "none is installed here, and no target states one; {newer} is at hand: --target mcore{newer}"
)
INSTALLED_ASSUMED = (
    "assumed: it is installed here, and no target states one; "
    "{newer} is at hand: --target mcore{newer}"
)
"""Reason of the installed release, where a newer one is at hand."""
NEWEST_LOCAL = "the newest at hand, as no target states one"
"""Reason of the release that a rehearsal imports."""
MODE_REASON = "the mode of the run"
"""Reason of values that follow from the mode, whatever program starts the run."""
MICRO_BATCH_REASON = (
    "the tokens of a full micro batch: max_tokens_per_gpu x context_parallel_size, "
    "since samples are packed"
)
"""Reason of a length that is counted and that no program sets."""


MAX_NAMED_RUNS = 3
"""Other runs of a file that an answer names; more are counted."""


DETERMINISM_VARIABLES = {
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""Variables that Megatron-LM sets at the start of a run with ``--deterministic-mode``.

It leaves a variable that is set. Source: megatron-core 0.19.2 training/determinism.py
apply_determinism_env.
"""
DETERMINISM_RELEASE = "0.19"
"""First megatron-core whose training sets them.

Megatron-LM core_v0.18.2 training/arguments.py sets none.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunChoice:
    """The run of a file that is meant.

    A file has several, or leaves something to its environment.
    """

    number: int | None = None
    """The number of the run, from 1; None: the first."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of a launch script, as its environment or command line would set them."""
    checkpoint: str | None = None
    """The folder, or the config.json, of the checkpoint that the run starts from.

    None where the file's own name of it counts.
    """
    asks_megatron_bridge: bool = False
    """Megatron Bridge itself makes the container of a recipe, in a process of its own."""

    def refuse_checkpoint(self, path: Path) -> None:
        """Refuse a checkpoint for a file that states the sizes of its model itself."""
        if self.checkpoint is not None:
            rule = f"is the checkpoint that makes a model, and that of {path} follows from the file"
            remedy = "Drop it, or give a file of NeMo-RL, verl, ms-swift or Megatron Bridge."
            raise RunConfigError.of("--context checkpoint", rule, self.checkpoint, remedy)

    def refuse_for(self, path: Path) -> None:
        """Refuse the choice of a run, or variables, for a file that has neither."""
        remedy = "Drop it, or give a launch script."
        if self.number is not None:
            rule = f"chooses among the runs of a script, and {path} is none"
            raise RunConfigError.of("--launch", rule, self.number, remedy)
        if self.variables:
            rule = f"sets variables of a launch script, and {path} is none"
            raise RunConfigError.of("--context", rule, dict(self.variables), remedy)
        if self.asks_megatron_bridge:
            rule = f"calls a recipe of Megatron Bridge, and {path} is none"
            remedy = "Drop it, or give a recipe."
            raise RunConfigError.of("--ask-megatron-bridge", rule, True, remedy)


@dataclass(frozen=True, kw_only=True, slots=True)
class DerivedValue:
    """One value that a framework sets at the start of a run, over the one in the file."""

    path: str
    """Dotted key ("ddp.align_param_gather")."""
    value: Any
    stated: Any = None
    """The value in the file; None where it states none."""
    because: str = ""
    """The setting or the condition that it follows from: "comm_overlap"."""
    set_by: str = ""
    """The framework that sets it; empty: the one that starts the run."""
    source: str = ""
    """The code in which a framework with a table sets it: file, function and commit."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        shown = {
            "path": self.path,
            "value": self.value,
            "in_file": self.stated,
            "because": self.because,
        }
        if self.set_by:
            shown["set_by"] = self.set_by
            shown["source"] = self.source
        return shown


@dataclass(frozen=True, kw_only=True, slots=True)
class FileReading:
    """One file that describes a run, as read; overrides are written over its sections later."""

    framework: str = PRECISION_BRIDGE
    """The framework that starts a run of this file."""
    base: str = ""
    """The framework below it, whose arguments or classes its
    settings are; empty: it has its own.
    """
    sections: Mapping[str, Any] = field(default_factory=dict)
    """Our section and key names -> plain values with Megatron's field spellings.

    `mixed_precision` is among them.
    """
    origins: Mapping[str, str] = field(default_factory=dict)
    """Setting ("model.hidden_size") that another file states -> that file's name."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Dotted key of the file, or its beginning -> ours, where they differ.

    An override may be written with either.
    """
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the file sets."""
    derived: tuple[DerivedValue, ...] = ()
    """Values that the framework sets at start.

    They stand in the sections of the run, not in `sections`.
    """
    own_fields: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key of a field of the framework's own classes -> its value.

    Megatron Core does not have these fields.
    """
    unknown: tuple[str, ...] = ()
    """What the file leaves open, as sentences."""
    no_plan_reason: str | None = None
    """Why the run has no plan, as a sentence: a source of its layers or precision is not read."""
    other_layers: str | None = None
    """The kind of the model, where its layers are none of a language model's.

    `unplanned` is the refusal then.
    """
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Option of the engine that generates samples, which trains nothing -> its value."""
    dropped_fields: tuple[DroppedField, ...] = ()
    """Fields of Megatron Core that the file states and that the framework's code does not forward."""
    uncounted: tuple[str, ...] = ()
    """Options that are not read, and may bear on the layout, the layers or the bytes.

    Memory gives no verdict then.
    """
    opened: Mapping[str, str] = field(default_factory=dict)
    """Setting whose value a source that is not read may change -> that source, as a noun."""
    is_of_checkpoint: bool = False
    """Whether the `config.json` of a checkpoint makes the model, so that its folder may be stated."""
    not_followed: str | None = None
    """Why the `config.json` of the checkpoint gives no sizes, as a sentence.

    None: they follow from it, or it is not read.
    """
    read_too: tuple[str, ...] = ()
    """Other files that were read, as sentences."""
    release: Version | None = None
    """The release of Megatron Core that the file is of.

    None: the file says nothing, and the installed one counts.
    """
    release_reason: str = ""
    """Why that release is assumed, as a clause."""
    mode_decided_by: str | None = None
    """What decides the mode, as a noun, where the file does not state it; None: the mode is known.
    """
    unstated_by: str | None = None
    """What decides the settings that the file does not state, as a noun.

    None: defaults that are known.
    """
    open_values: Mapping[str, str] = field(default_factory=dict)
    """Dotted key of a setting whose value only the run decides -> the value's text.

    The file states the setting.
    """
    variables: tuple[str, ...] = ()
    """Names of variables of a launch script that only its environment or its command line sets."""
    refused: tuple[Finding, ...] = ()
    """Words of its command line that the program's parser refuses."""
    faulty_options: tuple[Finding, ...] = ()
    """Options that its framework drops, or hands to other modules than their names say."""
    runs: tuple[str, ...] = ()
    """Each run of the file, in a few words."""
    number: int = 1
    """The run that this is, from 1."""
    answered_numbers: tuple[int, ...] = ()
    """Other runs that are answered together with this one."""
    branches: tuple[int, ...] = ()
    """The same launch on other branches of the script, by their numbers."""

    @property
    def is_release_assumed(self) -> bool:
        """Whether nothing says which release of Megatron Core it is."""
        return self.release_reason == NEWEST_ASSUMED

    @property
    def settings_of(self) -> str:
        """The framework whose arguments or classes its settings are."""
        return self.base or self.framework

    @property
    def is_release_installed(self) -> bool:
        """Whether the release is the installed one, since no target and no file states another."""
        reasons = (INSTALLED_HERE, INSTALLED_FOR_OPEN_FILE, NEWEST_LOCAL)
        return self.release_reason in reasons or self.release_reason.startswith(
            INSTALLED_ASSUMED.partition(";")[0]
        )

    @property
    def settled_at_start(self) -> frozenset[str]:
        """Settings set at start that follow from the mode, whatever the program does."""
        return frozenset(row.path for row in self.derived if row.because == MODE_REASON)

    @property
    def lines(self) -> tuple[str, ...]:
        """What an answer has to say of the file, as sentences.

        They are about the release, what is set at start, and what is open.
        """
        release = f"megatron-core {self.release} ({self.release_reason})."
        if self.release is None:
            reason = self.release_reason or "the target states none"
            release = f"No release of megatron-core is known: {reason}."
        return (release, *self._describe_start_values(), *self.read_too, *self.open, *self._chosen)

    def _describe_start_values(self) -> list[str]:
        """Return what the framework sets at start, a sentence for each reason."""
        reasons = []
        for row in self.derived:
            reasons.append(((row.set_by, row.because), f"{row.path}={row.value}"))
        sentences = []
        for (set_by, why), values in group_pairs(reasons).items():
            if why == MODE_REASON and self.mode_decided_by is not None:
                continue
            framework = set_by or self.settings_of
            verb = f"{framework} sets at start"
            if self.unstated_by is not None and why != MODE_REASON:
                verb = f"Assumed, as {framework} sets it at start"
            if why == MICRO_BATCH_REASON:
                verb = "Counted here"
            sentences.append(f"{verb}: {', '.join(values)} ({why}).")
        return sentences

    @property
    def _chosen(self) -> tuple[str, ...]:
        """The run that this is among those of the file, as a sentence.

        None of it where every other run is answered too.
        """
        answered = {self.number, *self.answered_numbers}
        others = [number for number in range(1, len(self.runs) + 1) if number not in answered]
        if not others:
            return ()
        named = []
        for number in others[:MAX_NAMED_RUNS]:
            named.append(f"--launch {number} is {self.runs[number - 1]}")
        if len(others) > MAX_NAMED_RUNS:
            named.append(f"and {len(others) - MAX_NAMED_RUNS} more")
        label = self.runs[self.number - 1]
        sentence = (
            f"The file has {len(self.runs)} runs; this is run {self.number}, {label} "
            f"({'; '.join(named)})."
        )
        return (sentence,)

    @property
    def open(self) -> tuple[str, ...]:
        """What the file leaves open, as sentences.

        The source without which there is no plan comes first.
        """
        if self.no_plan_reason is None or self.other_layers is not None:
            return self.unknown
        return (self.no_plan_reason, *self.unknown)

    def to_dict(self) -> dict[str, Any]:
        """Return what an answer has to say of the file, as plain data."""
        release = None
        if self.release is not None:
            release = str(self.release)
        run = None
        if self.runs:
            run = {"number": self.number, "of": list(self.runs)}
        return {
            "framework": self.framework,
            "megatron_core": release,
            "because": self.release_reason,
            "set_at_start": [row.to_dict() for row in self.derived],
            "read_too": list(self.read_too),
            "open": list(self.open),
            "unplanned": self.no_plan_reason,
            "uncounted": list(self.uncounted),
            "generation": dict(self.generation),
            "dropped": [dropped.to_dict() for dropped in self.dropped_fields],
            "mode_decided_by": self.mode_decided_by,
            "run": run,
        }

    def with_target_release(self, target: Target, *, is_stated: bool) -> FileReading:
        """Return the reading with the release of the target where the file says none.

        That release is stated by the target, or installed here.
        """
        if self.release is not None:
            return self
        if target.mcore is None:
            if is_stated:
                return self
            return replace(self, release_reason=get_installed_reason(NONE_INSTALLED))
        if target.is_detected:
            reason = OF_THIS_MACHINE
        elif is_stated:
            reason = "stated by the target"
        else:
            reason = get_installed_reason(INSTALLED_HERE)
        return replace(self, release=target.mcore, release_reason=reason)

    def with_rehearsed_release(self, version: str) -> FileReading:
        """Return the reading with the release that a rehearsal imported.

        A release that a target or the file states stays.
        """
        if not self.is_release_installed:
            return self
        return replace(self, release=parse_version(version), release_reason=NEWEST_LOCAL)

    def describe_dropped(self, path: str) -> tuple[str, ...]:
        """Return which keys of the file state a setting that they do not reach, as sentences."""
        sentences = []
        for dropped in self.dropped_fields:
            if dropped.path == path:
                key = f"{dropped.key}={dropped.value}"
                sentences.append(f"{dropped.framework} does not forward {key}.")
        return tuple(sentences)

    def translate_key(self, key: str) -> str:
        """Return our name of a dotted key that may be written with the file's."""
        for theirs, ours in self.names.items():
            if key == theirs or key.startswith(f"{theirs}."):
                return ours + key[len(theirs) :]
        return key


def get_installed_reason(reason: str) -> str:
    """Return why the installed release counts.

    It is the reason, or another one where a newer release is at hand.
    """
    newer = find_newer_megatron()
    if newer is None:
        return reason
    if reason == NONE_INSTALLED:
        return NONE_INSTALLED_NEWER_LOCAL.format(newer=newer)
    return INSTALLED_ASSUMED.format(newer=newer)
