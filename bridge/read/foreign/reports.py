"""`ImportReport` and `ExportReport`: the results of reading and writing another system's precision.

Nothing is dropped or guessed silently. An import maps each setting that affects precision to fields
of a recipe, or reports it as unmapped. An export maps each stated field to settings, or reports it
as unmapped. If a default of the system decides, the default is reported with its release and the
reason "implied default".

The mode is stated if the document states it, or if the document is the complete configuration of a
program with known defaults. Otherwise it stays unstated, and `ImportReport.decided_by` names the
source that decides it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from bridge.read.foreign.effective_fields import find_equivalent_recipe
from bridge.read.foreign.semantics import get_semantics
from bridge.registry.mixed_precision_config import MixedPrecisionConfig

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
    """The setting of an import, as the other system spells it; the field of an export."""
    value: object
    reason: str
    """A key of `DEFAULT_REMEDIES`."""
    detail: str
    """The difference, with the release that has it: a clause without a full stop."""
    remedy: str
    """The advice, as a sentence."""

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
    """The computation that the mode means, a key of `semantics.SEMANTICS`."""
    unmapped: tuple[Unmapped, ...] = ()
    """The settings that cannot be converted exactly."""
    mapped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Mapped setting -> the fields of `config` that it became.

    A setting without fields agrees with unstated fields."""
    recipe: str | None = None
    """The equivalent registered recipe. None: no recipe is equivalent.

    Fields that only Megatron has and that no recipe states may differ."""
    label: str = ""
    """The run, if the file starts several: "line 41, pretrain_gpt.py"."""
    decided_by: str | None = None
    """The source that decides an unstated mode, as a noun: "the recipe that run_recipe.py loads".

    It is None if the mode is stated, or is the known default of a program."""
    default_mode: str | None = "fp32"
    """The mode of the system if nothing states one; None if it has no default."""

    @property
    def mode_is_stated(self) -> bool:
        """Whether the document, or a known default, decides the mode."""
        return self.decided_by is None

    def assume_default(self) -> Self:
        """Return the report with the default mode of the system stated, if no mode is stated.

        The assumption is recorded. For a system without a default the mode stays unstated.
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
    """The input of the other system's loader: a mapping, a list of arguments, an object."""
    unmapped: tuple[Unmapped, ...] = ()
    """The stated fields that cannot be converted exactly."""
    mapped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Mapped field -> the settings of the payload that it became."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name of a file that the payload names -> its text."""
