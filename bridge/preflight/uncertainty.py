"""`Uncertainty`: the settings of a run that its file does not decide, and their deciders.

Two words have a fixed meaning here and in the readers:

    open      only the start of the run, or a source that is not read, decides the value:
              `--lr $LR`, a sourced file that is not there
    decider   what decides a value that is open, or that the file does not state, as a noun that
              a message names: "$PRECISION", "pretrain.sh, which is not found"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Uncertainty:
    """The settings of a run that are open, and the deciders of those that the file does not state."""

    open_points: tuple[str, ...] = ()
    """Sentences about open settings, and about arguments and sources that are not read."""
    mode_decider: str | None = None
    """The decider of the mode if the file does not state it. None: the mode is known."""
    default_decider: str | None = None
    """The decider of the settings that the file does not state.

    None: defaults that are known decide them.
    """
    open_values: Mapping[str, str] = field(default_factory=dict)
    """Setting that the file states by an open value -> the value's text."""
    unread_sources: Mapping[str, str] = field(default_factory=dict)
    """Setting -> its decider, a source that may change the value and is not read."""
    unread_options: tuple[str, ...] = ()
    """Options that are not read and may affect the layout, the layers or the bytes.

    The memory of the run gets no verdict then.
    """
    no_plan_reason: str | None = None
    """Why the run has no plan, as a sentence: a source of its layers or precision is not read."""
    other_model_kind: str | None = None
    """The kind of a model whose layers are not those of a language model.

    `no_plan_reason` refuses its plan then.
    """

    @property
    def has_any_decider(self) -> bool:
        """Whether a setting of the run has a decider, so that an answer may rest on it."""
        if self.default_decider is not None or self.mode_decider is not None:
            return True
        return bool(self.open_values) or bool(self.unread_sources)

    @property
    def sentences(self) -> tuple[str, ...]:
        """A sentence about each open setting, for an answer on the file.

        The source without which there is no plan comes first. The reason of another kind of model
        is the refusal of a plan, so it is not repeated here.
        """
        if self.no_plan_reason is None or self.other_model_kind is not None:
            return self.open_points
        return (self.no_plan_reason, *self.open_points)
