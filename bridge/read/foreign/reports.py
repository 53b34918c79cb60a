"""`ImportReport` and `ExportReport`: the results of reading and of writing a precision of another system.

Nothing is dropped and nothing is guessed silently. An import maps each setting that bears on
precision to fields of a recipe, or reports it as unmapped. An export maps each stated field to
settings, or reports it as unmapped. A default of the system that decides is reported too, with the
reason "implied default" and the version it was taken from.

A mode is stated only where something in the document states it, or where the document is the
complete configuration of a program whose defaults are known. Elsewhere the mode stays unstated, and
`ImportReport.decided_by` names what decides it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from bridge.read.foreign.effective_fields import find_equivalent_recipe
from bridge.read.foreign.semantics import get_semantics
from bridge.registry.config import MixedPrecisionConfig

DEFAULT_REMEDIES: Mapping[str, str] = {
    "unsupported": "Set it up by hand where you train next.",  # the other side has no such setting
    "approximated": "Nothing to do.",  # the nearest setting of the other side was taken
    "implied default": "Write it down if the run depends on it.",  # it is not written, and the system's default decides
    "dead knob": "Drop it.",  # the setting is written and has no effect
    "semantics": "Look at what it does.",  # the same word means another computation
}
"""Reason of an unmapped setting -> its usual remedy."""


@dataclass(frozen=True)
class Unmapped:
    """One setting that cannot be converted exactly."""

    field: str
    """The setting, as the system it was read from spells it."""
    value: object
    reason: str
    """A key of `REASONS`."""
    detail: str
    """The difference on the other side, with the version it was seen in: a clause without a stop."""
    remedy: str

    def __post_init__(self) -> None:
        if self.reason not in DEFAULT_REMEDIES:
            raise ValueError(
                f"reason: must be one of {', '.join(DEFAULT_REMEDIES)}, got {self.reason!r}."
            )

    def __str__(self) -> str:
        return f"{self.field}={self.value!r} ({self.reason}): {self.detail}. {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """The result of an import."""

    config: MixedPrecisionConfig
    """The precision. Only fields that the foreign configuration decides are stated."""
    semantics: str
    """A key of `semantics.SEMANTICS`."""
    unmapped: tuple[Unmapped, ...] = ()
    mapped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Mapped setting -> the fields of `config` that it became.

    A setting without fields agrees with what is unstated there."""
    recipe: str | None = None
    """The registered recipe of the same meaning, or None.

    Fields of Megatron's own that no recipe states may differ."""
    label: str = ""
    """The run, where the file starts several: "line 41, pretrain_gpt.py"."""
    decided_by: str | None = None
    """The source that decides an unstated mode, as a noun: "the recipe that run_recipe.py loads".

    It is None where the mode is stated, or is the known default of a program whose whole configuration was read."""
    default_mode: str | None = "fp32"
    """The mode that the system takes where nothing states one, or None for a system without a default."""

    @property
    def mode_is_stated(self) -> bool:
        """Whether the document, or a known default, decides the mode."""
        return self.decided_by is None

    def assume_default(self) -> Self:
        """Return the report with the system's default stated as the mode, and recorded, where no mode is stated.

        A system without a default leaves the mode open.
        """
        if self.decided_by is None or self.default_mode is None:
            return self
        config = type(self.config).from_dict({**self.config.to_dict(), self.default_mode: True})
        detail = f"assumed, since nothing in the file states it; {self.decided_by} decides"
        assumed = Unmapped("mode", self.default_mode, "implied default", detail, "State the mode.")
        kept = [entry for entry in self.unmapped if entry.field != "mode"]
        return replace(
            self,
            config=config,
            semantics=get_semantics(config),
            unmapped=(*kept, assumed),
            recipe=find_equivalent_recipe(config),
            decided_by=None,
        )


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """The result of an export."""

    payload: Any
    """The input of the other system's own loader: a mapping, a list of arguments, an object."""
    unmapped: tuple[Unmapped, ...] = ()
    mapped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Stated field that was mapped -> the settings of the payload that it became."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name of a file that the payload names -> its text."""
