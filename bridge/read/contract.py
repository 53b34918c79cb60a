"""The contract of every bridge to another system.

    import_(payload, **context) -> ImportReport    a configuration of the system, read as a recipe
    export(config, **context)   -> ExportReport    a recipe, written as a configuration of the system

Nothing is dropped and nothing is guessed silently. On import each setting that bears on precision
is mapped to fields or reported as unmapped; on export each stated field is mapped to settings or
reported as unmapped. A default that decides is reported too, with the reason "implied default" and
the version it was taken from.

A mode is stated only where something in the document states it, or where the document is the
complete configuration of a program whose defaults are known. Elsewhere the mode stays unstated and
`ImportReport.decided_by` names what decides.

The context holds facts that no configuration file can state: versions, the GPU, tf32,
torch.compile, the dtype of evaluation.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from bridge.read.meaning import recipe_named, semantics_of
from bridge.read.systems import KINDS
from bridge.registry.config import MixedPrecisionConfig

REASONS: Mapping[str, str] = {
    "unsupported": "Set it up by hand where you train next.",  # the other side has no such setting
    "approximated": "Nothing to do.",  # the nearest setting of the other side was taken
    "implied default": "Write it down if the run depends on it.",  # it is not written, and the system's default decides
    "dead knob": "Drop it.",  # the setting is written and has no effect
    "semantics": "Look at what it does.",  # the same word means another computation
}
"""Reason -> what to do where a row does not say it."""

SEMANTICS: Mapping[str, str] = {
    "megatron_o2": "half-precision weights everywhere, FP32 master weights in the optimizer",
    "amp_o1": "FP32 weights, each operator cast by autocast",
    "fsdp_policy": "FP32 shards, cast to half precision when they are gathered",
    "true": "half-precision weights and optimizer state, nothing in FP32",
    "fp32": "no half precision anywhere",
    "unstated": "the file does not state the mode, and does not show the whole run either",
}
"""The first four are all called "bf16 mixed" by one system or another."""


@dataclass(frozen=True)
class Unmapped:
    """One setting that cannot be converted exactly."""

    field: str
    """The setting, as the system it was read from spells it."""
    value: object
    reason: str
    detail: str
    """The difference on the other side, with the version it was seen in: one clause without a full
    stop."""
    remedy: str

    def __post_init__(self) -> None:
        if self.reason not in REASONS:
            raise ValueError(f"reason: must be one of {', '.join(REASONS)}, got {self.reason!r}.")

    def __str__(self) -> str:
        return f"{self.field}={self.value!r} ({self.reason}): {self.detail}. {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """The result of an import."""

    config: MixedPrecisionConfig
    """Only fields that the foreign configuration decides are stated."""
    semantics: str
    unmapped: tuple[Unmapped, ...] = ()
    mapped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Each mapped setting -> the fields of `config` it became.

    Without fields it agrees with what is unstated here."""
    recipe: str | None = None
    """The registered recipe that means the same, fields of Megatron's own that no recipe states
    aside; or None."""
    label: str = ""
    """The run of the file, where it starts several: "line 41, pretrain_gpt.py"."""
    decided_by: str | None = None
    """The source that decides the mode where the document does not, as a noun: "the recipe that
    run_recipe.py loads".  None: the mode is stated, or it is the known default of a program whose
    whole configuration this is."""
    default_mode: str | None = "fp32"
    """The mode that the system takes where nothing states one, which `assume_default` states; None:
    it has none."""

    @property
    def mode_is_stated(self) -> bool:
        """Whether the document, or a known default, decides the mode."""
        return self.decided_by is None

    def assume_default(self) -> Self:
        """Return the report with the system's own default stated as the mode, and recorded, where none is stated.

        A system without a default leaves it open.
        """
        if self.decided_by is None or self.default_mode is None:
            return self
        config = type(self.config).from_dict({**self.config.to_dict(), self.default_mode: True})
        detail = f"assumed, since nothing in the file states it; {self.decided_by} decides"
        assumed = Unmapped("mode", self.default_mode, "implied default", detail, "State the mode.")
        semantics = semantics_of(config)
        unmapped = (*(entry for entry in self.unmapped if entry.field != "mode"), assumed)
        recipe = recipe_named(config)
        return replace(
            self,
            config=config,
            semantics=semantics,
            unmapped=unmapped,
            recipe=recipe,
            decided_by=None,
        )


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """The result of an export."""

    payload: Any
    """The input of the other system's own loader: a mapping, a list of arguments, an object."""
    unmapped: tuple[Unmapped, ...] = ()
    mapped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Each mapped field that was stated -> the settings of the payload it became."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name of a file that the payload names -> its text."""


@dataclass(frozen=True)
class Recognised:
    """Why a document is taken for a system's."""

    certainty: float
    """0 to 1; the highest wins, a tie is an error that names both."""
    evidence: str
    """The evidence, as a clause: "has `fp16.enabled` and `zero_optimization`, which only DeepSpeed
    reads"."""


@dataclass(frozen=True)
class ContextKey:
    """One fact that `import_` or `export` takes and no file states."""

    name: str
    meaning: str
    use: tuple[str, ...] = ("import",)
    """Which functions take it: "import", "export"."""


@dataclass(frozen=True)
class System:
    """One foreign system; each module of this room ends with `SYSTEM = System(...)`."""

    name: str
    """As in `--to NAME`: lower case, hyphens."""
    title: str
    version: str
    """The release its facts were taken from."""
    export: Callable[..., ExportReport]
    import_: Callable[..., ImportReport]
    recognise: Callable[[Any], Recognised | None]
    """Takes a `document.Document` and returns None for another system's."""
    write: Callable[[Any], str] = str
    read: Callable[[Any], Any] | None = None
    """Takes a `document.Document` and returns the payload for `import_`; None: the document's
    parsed content is it."""
    context: tuple[ContextKey, ...] = ()
    import_all: Callable[..., tuple[ImportReport, ...]] | None = None
    """As `import_`, for a payload that starts several runs: one `ImportReport` each, the first
    being `import_`'s."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of document it is written in: yaml, json, shell, python, env, text."""
        return KINDS[self.name]


def as_json(payload: Any) -> str:
    """Return a payload as the text of a JSON file."""
    return json.dumps(payload, indent=2) + "\n"


def as_yaml(payload: Any) -> str:
    """Return a payload as the text of a YAML file."""
    import yaml  # here only: reading a launch script needs no YAML

    return str(yaml.safe_dump(payload, sort_keys=False))
