"""`Uncertainty`: the settings of a run that its file does not decide, and their deciders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Uncertainty:
    """The settings of a run that its file leaves to something that is not read.

    A decider is a noun that a message names: "$PRECISION", "pretrain.sh, which is not found".
    """

    open_points: tuple[str, ...] = ()
    """A sentence about each setting that the file leaves open."""
    mode_decider: str | None = None
    """What decides the mode if the file does not state it. None: the mode is known."""
    default_decider: str | None = None
    """What decides the settings that the file does not state.

    None: defaults that are known decide them.
    """
    late_values: Mapping[str, str] = field(default_factory=dict)
    """Setting that the file states by a value which only the start decides -> the value's text."""
    unread_sources: Mapping[str, str] = field(default_factory=dict)
    """Setting -> the source that may change its value and is not read."""
    uncounted_options: tuple[str, ...] = ()
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
    def is_any_value_open(self) -> bool:
        """Whether a value of the run is assumed, or decided when it starts."""
        if self.default_decider is not None or self.mode_decider is not None:
            return True
        return bool(self.late_values) or bool(self.unread_sources)

    @property
    def sentences(self) -> tuple[str, ...]:
        """A sentence about each point that the file leaves open.

        The source without which there is no plan comes first. The reason of another kind of model
        is the refusal of a plan, so it is no open point.
        """
        if self.no_plan_reason is None or self.other_model_kind is not None:
            return self.open_points
        return (self.no_plan_reason, *self.open_points)
