"""The training loss of one run over its steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Losses = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Records of a run, each the mean loss of the steps since the record before."""

    steps: tuple[int, ...]
    """Last step of each record, increasing, from 1 on."""
    losses: tuple[float, ...]
    """In nats per token; NaN where the loss was not finite."""

    def over(self, boundaries: Sequence[int]) -> Losses:
        """Return the mean loss of each interval that ends at one of these steps of the curve.

        A skipped step has a record of its own, so two runs can have records at different steps.
        """
        steps = np.asarray(self.steps)
        weights = np.diff(steps, prepend=0)
        interval = np.searchsorted(np.asarray(boundaries), steps)  # the records after the last boundary come last
        count = len(boundaries) + 1
        sums = np.bincount(interval, weights=weights * np.asarray(self.losses), minlength=count)
        return sums[:-1] / np.bincount(interval, weights=weights, minlength=count)[:-1]

    def first_lost(self) -> int | None:
        """Return the step of the first record without a finite loss, None where all are finite."""
        return next((step for step, loss in zip(self.steps, self.losses, strict=True) if not np.isfinite(loss)), None)


def common_steps(curves: Sequence[Curve]) -> list[int]:
    """Return the steps at which every one of the curves has a record."""
    return sorted(set.intersection(*(set(curve.steps) for curve in curves))) if curves else []
