"""`ModuleSelection`: the modules that each row of `modules`, or each foreign matcher, selects.

`bridge.plan.selection` makes it, and rules read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridge.precision.matchers import Matcher


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedModule:
    """A module of a layer, with its position in the model and its scheme."""

    layer: str
    number: int | None
    """The number of the layer in the whole model, from 0. None: embedding, MTP or output layer."""
    module: str
    kind: str
    path: str
    name_in_chunk: str
    """The path of the module within its model chunk."""
    chunk: int
    is_low_precision: bool
    scheme: str | None
    """The scaling scheme of its GEMMs in the plan. None: no GEMM of it is in FP8 or FP4."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSelection:
    """The modules that one row or matcher selects."""

    matcher: Matcher
    taken: tuple[PlacedModule, ...]
    """The linear layers whose precision the row decides."""
    shadowed: tuple[PlacedModule, ...]
    """Selected linear layers whose precision an earlier row or matcher decides."""
    shadowed_by: tuple[str, ...]
    """The names of these earlier rows or matchers."""
    unread: tuple[PlacedModule, ...]
    """Selected modules that read no per-module recipe."""
    similar_names: tuple[str, ...]
    """Names of modules that are similar to the pattern, if the pattern selects no module."""
    absent_layers: tuple[int, ...]
    """Layer numbers of the row that the model does not have, as the row states them."""
    unmatched_layers: tuple[int, ...]
    """Layer numbers of the row in whose layers it selects no module, as the row states them."""

    @property
    def is_empty(self) -> bool:
        """Whether the row selects no linear layer."""
        return not self.taken and not self.shadowed

    @property
    def is_shadowed(self) -> bool:
        """Whether earlier rows decide every linear layer that the row selects."""
        return not self.taken and bool(self.shadowed)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the layers in which the row selects a linear layer."""
        numbers: dict[int, None] = {}
        for module in (*self.taken, *self.shadowed):
            if module.number is not None:
                numbers[module.number] = None
        return tuple(numbers)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageDependentMatcher:
    """A foreign matcher that selects other layers under another number of pipeline stages."""

    row: RowSelection
    stages: int
    """The other number of pipeline stages."""
    numbers: tuple[int, ...]
    """Numbers of the layers that the matcher selects under that number of stages."""


@dataclass(frozen=True, kw_only=True)
class ModuleSelection:
    """The rows or matchers of a run in order, with the modules that they select."""

    rows: tuple[RowSelection, ...]
    is_foreign: bool
    """Whether the matchers are of a foreign recipe. They match module paths within a chunk."""
    unselected: tuple[PlacedModule, ...]
    """The linear layers that no row or matcher selects."""
    num_layers: int
    other_stages: tuple[StageDependentMatcher, ...] = ()
    """The matchers that select other layers under another number of pipeline stages."""
