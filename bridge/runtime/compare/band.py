"""One batch in two precisions: the error of each GEMM's result, and the band it may be in.

With the same weights and the same batch, the results of two runs differ by roundings alone. The
relative error of a gradient grows with the layers behind it: for layer l of L it stays below
k C^(L + 1 - l) u, with C close to 1. That of an activation grows with the layers before it, and is
held to k C^l u. u is the largest relative error of one rounding, half of a format's epsilon, summed
over the two precisions; the coarsest format of the pass counts.

Source: arXiv 2506.09280, theorem 5.3; k and C as in Megatron-LM's test_optimizer_grads_match.py
(d98e8a64), which takes the whole epsilon of BF16 and compares two layouts in one precision.
*Differs*: half the epsilon; with the whole one of E5M2 the bound is above 1, which is the error of
a gradient that is zero.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bridge.precision.formats import FORMATS

ERROR_GROWTH_PER_LAYER = 1.03
"""C: the growth of the error from layer to layer."""
BOUND_FACTOR = 4.0
"""k: the roundings of one layer, together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmLocation:
    """A GEMM of a linear layer."""

    layer: int
    """Number of the transformer layer in the whole model, from 1 on."""
    module: str
    gemm: str
    """fprop, dgrad or wgrad.

    Its result is an activation, the gradient of an activation, or that of a weight.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class BandRow(GemmLocation):
    """One GEMM's result in two runs."""

    error: float
    """|a - b| / |a|, Frobenius norms; NaN and infinity count as outside."""
    bound: float
    control: float
    """The same error between two different batches in the first precision."""

    @property
    def is_inside(self) -> bool:
        """Whether the error is one of roundings."""
        return self.error <= self.bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Every GEMM of a model."""

    rows: tuple[BandRow, ...]
    """In the order of execution."""
    rerouted: float | None = None
    """Part of the tokens that the second precision alone would have sent to other experts.

    It is None for a model without experts.
    """

    @property
    def first_outside(self) -> BandRow | None:
        """The first result that left the band; later ones inherit its error."""
        for row in self.rows:
            if not row.is_inside:
                return row
        return None

    @property
    def blind(self) -> tuple[BandRow, ...]:
        """Results whose bound is so wide that the error of another batch stays below it."""
        rows = []
        for row in self.rows:
            if row.control <= row.bound:
                rows.append(row)
        return tuple(rows)

    @property
    def verdict(self) -> str:
        """Whether every error is inside.

        *cannot tell* where most bounds would not notice another batch.
        """
        if self.first_outside is not None:
            return "outside"
        if not self.rows or 2 * len(self.blind) > len(self.rows):
            return "cannot tell"
        return "inside"


def compute_rounding_error(formats: Iterable[str]) -> float:
    """Return the largest relative error of one rounding to the coarsest of these formats."""
    return max(FORMATS[name].epsilon for name in formats) / 2


def compute_band(
    errors: Mapping[GemmLocation, float],
    control: Mapping[GemmLocation, float],
    *,
    num_layers: int,
    forward: float,
    backward: float,
    rerouted: float | None = None,
) -> Band:
    """Return the band: the relative error of each GEMM's result, with its bound.

    Args:
        errors: Error of each GEMM's result between the two precisions, in the order of execution.
        control: Error of each GEMM's result between two different batches in the first precision.
        num_layers: Layers of the model.
        forward: Rounding of a forward GEMM, the sum of the two precisions (u above).
        backward: Rounding of a backward GEMM, the sum of the two precisions.
        rerouted: Part of the tokens that went to other experts; None for a model without experts.
    """
    rows = []
    for place, error in errors.items():
        if place.gemm == "fprop":
            depth, roundings = place.layer, forward
        else:
            depth, roundings = num_layers + 1 - place.layer, backward
        row = BandRow(
            layer=place.layer,
            module=place.module,
            gemm=place.gemm,
            error=error,
            bound=BOUND_FACTOR * ERROR_GROWTH_PER_LAYER**depth * roundings,
            control=control.get(place, math.nan),
        )
        rows.append(row)
    return Band(rows=tuple(rows), rerouted=rerouted)
