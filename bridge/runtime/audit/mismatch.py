"""`Mismatch`: one row in which a step differs from its plan, or from another step."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from bridge.plan.precision_plan import format_ranges
from bridge.precision.schemes import GEMMS

MISMATCH_TEXTS = {
    "formats": "planned {planned}, ran {ran}",
    "tile": "planned a scale for each {planned}, ran with one for each {ran}",
    "output": "planned a {planned} result, got {ran}",
    "accumulate": "planned an {planned} accumulator, ran with {ran}",
    "storage": "planned {planned} as the stored format of the weight, got {ran}",
    "absent": "planned {planned}, recorded no such GEMM",
    "unplanned": "ran {ran}, which is not in the plan",
    "error": "planned a relative error of at most {planned}, got {ran}",
    "stale": "planned the quantisation of the current weight, multiplied an older one",
    "gathered": "planned the masters of the optimizer on every data-parallel rank, "
    "gathered other weights",
    "census": "planned {planned}, got {ran}",
    "differs": "{planned} in the first, {ran} in the second",
}
"""Column -> sentence of a mismatch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """A row in which a record differs from the plan.

    Layers, modules and GEMMs with the same difference are in one row (`fold_mismatches`).
    """

    column: str
    """A key of `MISMATCH_TEXTS`."""
    planned: str
    """The planned value as text."""
    ran: str
    """The recorded value as text."""
    layers: tuple[str, ...] = ()
    """Labels of layers, as in a `GemmRow`."""
    modules: tuple[str, ...] = ()
    gemms: tuple[str, ...] = ()
    """fprop, dgrad and wgrad, or some of them."""
    tensors: str = ""
    """Kind of tensor, for a row of the census."""
    cause: str = ""
    """A clause about the cause; empty if the cause is not known."""

    def __str__(self) -> str:
        difference = MISMATCH_TEXTS[self.column].format(planned=self.planned, ran=self.ran)
        layers = ", ".join(self.layers)
        if count_layer_numbers(self.layers):
            layers = f"{format_layer_noun(len(self.layers))} {format_ranges(self.layers)}"
        parts = [self.tensors, layers, *self.modules]
        if len(self.gemms) != len(GEMMS):
            parts += self.gemms
        location = ", ".join(filter(None, parts))
        if self.cause:
            return f"{difference}: {location}; {self.cause}."
        return f"{difference}: {location}."


def count_layer_numbers(labels: Iterable[str]) -> int:
    """Return how many labels of layers are numbers."""
    return sum(map(str.isdecimal, labels))


def format_layer_noun(count: int) -> str:
    """Return "layer" for one layer and "layers" for several."""
    if count > 1:
        return "layers"
    return "layer"


def make_location(layer: str, module: str, gemm: str) -> dict[str, Any]:
    """Return the location of one GEMM as fields of a `Mismatch`."""
    return {"layers": (layer,), "modules": (module,), "gemms": (gemm,)}


def fold_mismatches(unfolded: Iterable[Mismatch]) -> tuple[Mismatch, ...]:
    """Return the mismatches, and join those that differ in only one part of their location.

    The layers are folded first, then the GEMMs, then the modules.
    """
    for name in ("layers", "gemms", "modules"):
        cleared: dict[str, Any] = {name: ()}
        values_of: dict[Mismatch, dict[str, None]] = {}  # mismatch without the part -> its values
        for mismatch in unfolded:
            values = values_of.setdefault(replace(mismatch, **cleared), {})
            values.update(dict.fromkeys(getattr(mismatch, name)))
        folded = []
        for mismatch, values in values_of.items():
            together: dict[str, Any] = {name: tuple(values)}
            folded.append(replace(mismatch, **together))
        unfolded = folded
    return tuple(unfolded)
