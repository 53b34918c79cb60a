"""`compute_band`: the error of each GEMM's result between two precisions, with its bound.

With the same weights and the same batch, the results of two precisions differ only by roundings.
The relative error of a gradient grows with each layer of the backward pass: for layer l of L it
stays below k C^(L + 1 - l) u, with C close to 1. The error of an activation grows with the layers
of the forward pass, and its bound is k C^l u. u is the largest relative error of one rounding, half
of a format's epsilon, summed over the two precisions. The coarsest format of the pass counts.

Source: arXiv 2506.09280, theorem 5.3; k and C as in Megatron-LM's test_optimizer_grads_match.py
(d98e8a64), which takes the whole epsilon of BF16 and compares two layouts in one precision.
*Differs*: half of the epsilon is used. With the whole epsilon of E5M2 the bound would be above 1,
which is the error of a gradient that is wrongly zero.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bridge.precision.formats import FORMATS

ERROR_GROWTH_PER_LAYER = 1.03
"""C: the growth of the error from layer to layer."""
BOUND_FACTOR = 4.0
"""k: the roundings of one layer together, in units of u."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmLocation:
    """A GEMM of a linear layer."""

    layer: int
    """Number of the transformer layer in the whole model, from 1 on."""
    module: str
    """Name of the linear layer in its transformer layer."""
    gemm: str
    """fprop, dgrad or wgrad.

    The result is an activation, the gradient of an activation, or the gradient of a weight.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class BandRow(GemmLocation):
    """One GEMM's result in two runs."""

    error: float
    """|a - b| / |a| in Frobenius norms, a in the first precision. NaN and infinity are outside."""
    bound: float
    """Largest error that roundings explain."""
    control: float
    """The same error between two different batches in the first precision."""

    @property
    def is_inside(self) -> bool:
        """Whether roundings explain the error."""
        return self.error <= self.bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """The rows of all GEMMs of a model, and the verdict on them."""

    rows: tuple[BandRow, ...]
    """Rows in the order of execution."""
    rerouted: float | None = None
    """Share of the tokens that the second precision would have sent to other experts, 0 to 1.

    Both precisions compute with the experts that the first precision chose. None: no experts.
    """

    @property
    def first_outside(self) -> BandRow | None:
        """The first result outside of the band. None: no result is outside.

        Later results inherit its error.
        """
        for row in self.rows:
            if not row.is_inside:
                return row
        return None

    @property
    def blind(self) -> tuple[BandRow, ...]:
        """Results with a bound so wide that another batch would stay below it."""
        rows = []
        for row in self.rows:
            if row.control <= row.bound:
                rows.append(row)
        return tuple(rows)

    @property
    def verdict(self) -> str:
        """The verdict on all errors: inside, outside, or cannot tell.

        It is "cannot tell" if most bounds would accept another batch.
        """
        if self.first_outside is not None:
            return "outside"
        if not self.rows or 2 * len(self.blind) > len(self.rows):
            return "cannot tell"
        return "inside"


def compute_rounding_error(formats: Iterable[str]) -> float:
    """Return the largest relative error of one rounding to the coarsest of some formats."""
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
        forward: u of a forward GEMM: the rounding error of both precisions, summed.
        backward: u of a backward GEMM.
        rerouted: Share of the tokens that would go to other experts. None: no experts.
    """
    rows = []
    for location, error in errors.items():
        if location.gemm == "fprop":
            depth, rounding_error = location.layer, forward
        else:
            depth, rounding_error = num_layers + 1 - location.layer, backward
        row = BandRow(
            layer=location.layer,
            module=location.module,
            gemm=location.gemm,
            error=error,
            bound=BOUND_FACTOR * ERROR_GROWTH_PER_LAYER**depth * rounding_error,
            control=control.get(location, math.nan),
        )
        rows.append(row)
    return Band(rows=tuple(rows), rerouted=rerouted)
