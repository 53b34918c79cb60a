"""`ModuleSelection`: the modules that each row of `modules`, or each foreign matcher, takes.

The plan makes it (`bridge.plan.selection`), and rules ask it.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridge.precision.matchers import Matcher


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedModule:
    """A module of a layer, with its place in the model and its scheme."""

    layer: str
    number: int | None
    """The layer's number from 0 over the whole model; None for embedding, MTP and output."""
    module: str
    kind: str
    path: str
    name_in_chunk: str
    """Its name within its model chunk."""
    chunk: int
    is_low_precision: bool
    scheme: str | None
    """The scaling scheme of its GEMMs in the plan; None: none of them is in FP8 or FP4."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSelection:
    """The modules that one row or matcher selects."""

    matcher: Matcher
    taken: tuple[PlacedModule, ...]
    """The linear layers that it takes."""
    shadowed: tuple[PlacedModule, ...]
    """Linear layers that it selects and an earlier row or matcher takes."""
    shadowed_by: tuple[str, ...]
    """The names of these earlier rows or matchers."""
    unread: tuple[PlacedModule, ...]
    """Modules that it selects and that read no per-module recipe."""
    similar_names: tuple[str, ...]
    """Names of modules that look like the pattern, where it selects none."""
    absent_layers: tuple[int, ...]
    """Layers that it names, as it states them, and that the model does not have."""
    unmatched_layers: tuple[int, ...]
    """Layers of the model that it names, as it states them, and in which it selects no module."""

    @property
    def is_empty(self) -> bool:
        """Whether it selects no linear layer at all."""
        return not self.taken and not self.shadowed

    @property
    def is_shadowed(self) -> bool:
        """Whether earlier rows take every linear layer that it selects."""
        return not self.taken and bool(self.shadowed)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the layers that it selects linear layers of."""
        numbers: dict[int, None] = {}
        for module in (*self.taken, *self.shadowed):
            if module.number is not None:
                numbers[module.number] = None
        return tuple(numbers)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageDependentMatcher:
    """A foreign matcher that means other layers under another number of pipeline stages."""

    row: RowSelection
    stages: int
    """The other number of pipeline stages."""
    numbers: tuple[int, ...]
    """Numbers of the layers that it selects under that number of stages."""


@dataclass(frozen=True, kw_only=True)
class ModuleSelection:
    """The rows or matchers of a run, in order."""

    rows: tuple[RowSelection, ...]
    is_foreign: bool
    """Whether they are of a foreign recipe, whose names are those within a chunk."""
    unselected: tuple[PlacedModule, ...]
    """The linear layers that no row or matcher selects."""
    num_layers: int
    other_stages: tuple[StageDependentMatcher, ...] = ()
    """The matchers that mean other layers under another number of pipeline stages."""
