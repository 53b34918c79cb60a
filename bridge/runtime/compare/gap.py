"""`judge_gap`: the gap between the losses of two recipes, and the verdict on it.

Two runs of one seed begin with the same weights and see the same batches. Their difference has no
noise of the data, so the gap is estimated from differences, one per seed:

    d_s   mean over the window of (loss of the recipe - loss of the baseline), of seed s
    gap   mean of d_s, divided by the baseline's mean loss in the window
    t-interval of n seeds:   gap +- t(0.95, n - 1) * sd(d_s) / sqrt(n)

The interval leaves 5 % on each side (90 % in all), since both verdicts are one-sided tests at that
level. *within* needs two such tests (TOST, two one-sided tests).

The window is the last half of the steps after the warm-up, so that a gap that opens late counts in
full. The verdict is *outside* if the whole interval is beyond the gate, *within* if the whole
interval is inside the gate, and *cannot tell* otherwise. It is never *within* if the baseline
learned little, because a recipe that learns nothing would pass.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median_high
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bridge.errors import RunConfigError
from bridge.runtime.audit.run_log import describe_lost_steps

Verdict = Literal["within", "outside", "cannot tell"]
Losses = NDArray[np.float64]

DEFAULT_GATE = 0.01
"""Share of the baseline's loss that a gap may reach."""
CONFIDENCE = 0.90
"""Probability with which the interval contains the gap."""
WINDOW_SHARE = 0.5
"""Share of the steps after the warm-up that is judged. The last steps are judged."""
MIN_RECORDS = 3
"""The smallest number of records in the window that is judged."""
MIN_LOSS_FALL_IN_GATES = 2
"""The smallest fall of the baseline's loss, in gates, at which a gap can be judged as within."""
MAX_SEEDS = 100
"""The largest number of seeds that `estimate_seeds_needed` returns."""
MAX_CURVE_POINTS = 24
"""The largest number of points of a `GapCurve`."""
LOG_INTERVAL_SETTING = "logging.log_interval"
"""The setting of this project's runs that decides how often a loss is recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCurve:
    """The training loss of a run over its steps.

    A record is the mean loss of the steps since the record before, or the loss of a single step.
    """

    steps: tuple[int, ...]
    """Last step of each record, increasing, from 1 on."""
    losses: tuple[float, ...]
    """In nats per token; NaN if the loss was not finite."""
    is_sampled: bool = False
    """Whether each loss is the loss of a single step. False: the mean since the last record."""

    def average_losses(self, boundaries: Sequence[int]) -> Losses:
        """Return the loss of each interval that ends at a boundary.

        The loss is the mean over the interval. A skipped step has a separate record, so that two
        runs can have records at different steps. Only their means over common intervals can be
        compared. For a curve of single steps the loss is the loss of the boundary.

        Args:
            boundaries: Steps at which the curve has a record, increasing.
        """
        steps = np.asarray(self.steps)
        if self.is_sampled:
            return np.asarray(self.losses)[np.searchsorted(steps, np.asarray(boundaries))]
        weights = np.diff(steps, prepend=0)
        interval_numbers = np.searchsorted(np.asarray(boundaries), steps)
        count = len(boundaries) + 1  # the last interval has the records after the last boundary
        weighted_losses = weights * np.asarray(self.losses)
        sums = np.bincount(interval_numbers, weights=weighted_losses, minlength=count)
        return sums[:-1] / np.bincount(interval_numbers, weights=weights, minlength=count)[:-1]

    def find_first_lost(self) -> int | None:
        """Return the step of the first record without a finite loss, or None if all are finite."""
        for step, loss in zip(self.steps, self.losses, strict=True):
            if not math.isfinite(loss):
                return step
        return None


def find_common_steps(curves: Sequence[LossCurve]) -> list[int]:
    """Return the steps at which every curve has a record, increasing."""
    if not curves:
        return []
    steps = set(curves[0].steps)
    for curve in curves[1:]:
        steps.intersection_update(curve.steps)
    return sorted(steps)


Pairs = Sequence[tuple[LossCurve, LossCurve]]
"""(baseline, recipe) of each seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GapCurve:
    """The gap over the steps, in shares of the baseline's loss. Each point is a block of steps."""

    steps: tuple[int, ...]
    """Last step of each block."""
    mean: tuple[float, ...]
    """Mean over the seeds."""
    low: tuple[float, ...]
    """Lower end of the interval. With one seed it is the mean."""
    high: tuple[float, ...]
    """Upper end of the interval. With one seed it is the mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """The gap of one recipe."""

    verdict: Verdict
    reason: str
    """The reason of the verdict, as a sentence."""
    seeds: int
    """Number of seeds that both recipes ran."""
    gate: float
    """Share of the baseline's loss that a gap may reach."""
    window: tuple[int, int] | None = None
    """First and last step that were judged. None: no step was judged."""
    baseline_loss: float | None = None
    """Mean loss of the baseline over seeds and window. None: no step was judged."""
    loss: float | None = None
    """Mean loss of the recipe over seeds and window. None: no step was judged."""
    share: float | None = None
    """The gap as a share of the baseline's loss. It is positive if the recipe's loss is higher.

    None: nothing was judged, or the baseline's loss is not above zero.
    """
    low: float | None = None
    """Lower end of the interval of the share. None: there is only one seed."""
    high: float | None = None
    """Upper end of the interval of the share. None: there is only one seed."""
    bit_equal: bool = False
    """Whether every record of the recipe equals the baseline's."""
    seeds_needed: int | None = None
    """Seeds that would decide with this spread.

    None: there are enough seeds, or more than `MAX_SEEDS` would be needed.
    """
    over_steps: GapCurve | None = None
    """The gap over the steps. None: nothing was judged."""


def judge_gap(
    pairs: Pairs,
    *,
    warm_up: int,
    gate: float = DEFAULT_GATE,
    interval_setting: str = LOG_INTERVAL_SETTING,
) -> Gap:
    """Return the gap of a recipe and the verdict on it.

    Args:
        pairs: The losses of baseline and recipe, a pair per seed that both ran.
        warm_up: Steps of the learning rate's warm-up, which are not judged.
        gate: Share of the baseline's loss that a gap may reach.
        interval_setting: Setting of the runs that decides how often a loss is recorded, for
            messages.
    """
    curves: list[LossCurve] = []
    for pair in pairs:
        curves += pair
    steps = find_common_steps(curves)
    decision = _decide_without_gap(pairs)
    if decision is None and not steps and all(curve.steps for curve in curves):
        decision = _Decision("cannot tell", "The runs have no step of which each has a record.")
    if decision is None:
        too_short = describe_too_short(steps, warm_up, interval_setting)
        if too_short is not None:
            decision = _Decision("cannot tell", too_short)
    if decision is not None:
        return Gap(verdict=decision.verdict, reason=decision.reason, seeds=len(pairs), gate=gate)
    return _judge_finite(pairs, steps, _select_window(steps, warm_up), gate)


class _Decision(NamedTuple):
    """The verdict on a gap, and its reason."""

    verdict: Verdict
    reason: str
    seeds_needed: int | None = None


def _decide_without_gap(pairs: Pairs) -> _Decision | None:
    """Return the verdict if there is no gap, because a seed is missing or a loss is not finite.

    The result is None if all losses are finite.
    """
    lost: list[LossCurve] = []
    lost_baselines: list[LossCurve] = []
    for baseline, recipe in pairs:
        if recipe.find_first_lost() is not None:
            lost.append(recipe)
        if baseline.find_first_lost() is not None:
            lost_baselines.append(baseline)
    if not pairs:
        return _Decision("cannot tell", "No seed was run with both recipes.")
    if lost_baselines:
        steps = _describe_lost_curves(lost_baselines)
        return _Decision("cannot tell", f"The baseline's own loss is not finite {steps}.")
    if lost:
        steps = _describe_lost_curves(lost)
        reason = f"Its loss is not finite {steps} in {len(lost)} of {len(pairs)} seeds."
        return _Decision("outside", reason)
    return None


def _describe_lost_curves(curves: Iterable[LossCurve]) -> str | None:
    """Return the steps at which the loss of any curve is not finite, as an adverbial of time."""
    finite_at: dict[int, bool] = {}
    for curve in curves:
        for step, loss in zip(curve.steps, curve.losses, strict=True):
            finite_at[step] = finite_at.get(step, True) and math.isfinite(loss)
    return describe_lost_steps(dict(sorted(finite_at.items())))


def _select_window(steps: Sequence[int], warm_up: int) -> list[int]:
    """Return the steps that are judged: the last `WINDOW_SHARE` of the steps after the warm-up."""
    after_warm_up = [step for step in steps if step > warm_up]
    return after_warm_up[int(len(after_warm_up) * (1 - WINDOW_SHARE)) :]


def describe_too_short(
    steps: Sequence[int], warm_up: int, interval_setting: str = LOG_INTERVAL_SETTING
) -> str | None:
    """Return a sentence about why runs are too short and how long they must be.

    The result is None if they are long enough.

    Args:
        steps: Steps at which all runs have a record.
        warm_up: As for `judge_gap`.
        interval_setting: As for `judge_gap`.
    """
    if len(_select_window(steps, warm_up)) >= MIN_RECORDS:
        return None
    interval, recorded = 1, 0
    if steps:
        interval = _get_record_interval(steps)
        recorded = steps[-1] - max(0, steps[0] - interval)
    needed = math.ceil((warm_up + interval * MIN_RECORDS / WINDOW_SHARE) / interval) * interval
    remedy = f"{needed} steps would do."
    if interval > 1:
        remedy = f"{needed} steps would do, or a shorter {interval_setting}."
    return (
        f"{recorded} steps with a warm-up of {warm_up} and a record every {interval} are too few. "
        f"{remedy}"
    )


def _get_record_interval(steps: Sequence[int]) -> int:
    """Return the number of steps between two records.

    With three and more records the distances decide, and not the step of the first record: a log
    can begin in the middle of a run, or have a separate record of the first step.
    """
    if len(steps) < 3:
        return steps[0]
    distances = []
    for earlier, later in pairwise(steps):
        distances.append(later - earlier)
    return median_high(distances)


def _judge_finite(pairs: Pairs, steps: list[int], window_steps: list[int], gate: float) -> Gap:
    """Return the gap of finite losses, and the verdict on it.

    Args:
        pairs: As for `judge_gap`.
        steps: Steps at which all runs have a record.
        window_steps: The last of these steps, which are judged.
        gate: As for `judge_gap`.
    """
    window = (_get_first_step(steps, len(window_steps)), window_steps[-1])
    weights = np.diff(steps, prepend=0).astype(np.float64)[-len(window_steps) :]
    baseline_losses = np.stack([baseline.average_losses(steps) for baseline, _ in pairs])
    recipe_losses = np.stack([recipe.average_losses(steps) for _, recipe in pairs])
    differences = recipe_losses - baseline_losses
    baseline_loss = float(np.mean(_average_weighted(baseline_losses, weights)))
    gap = Gap(
        verdict="cannot tell",
        reason=(
            f"The mean of the baseline's loss in steps {window[0]} to {window[1]} is "
            f"{baseline_loss:g}, and a gap is a share of a loss above 0."
        ),
        seeds=len(pairs),
        gate=gate,
        window=window,
        baseline_loss=baseline_loss,
        loss=baseline_loss + float(np.mean(_average_weighted(differences, weights))),
        bit_equal=all(baseline == recipe for baseline, recipe in pairs),
    )
    if baseline_loss <= 0:
        return gap
    judged = _judge_share(
        gap,
        per_seed=_average_weighted(differences, weights) / baseline_loss,
        fall=_compute_fall(float(np.mean(baseline_losses[:, 0])), baseline_loss),
    )
    return replace(judged, over_steps=_make_gap_curve(baseline_losses, differences, steps))


def _compute_fall(first_loss: float, loss: float) -> float:
    """Return the share by which a loss has fallen from its first value.

    The share is 0 if the first value is not positive.
    """
    if first_loss <= 0:
        return 0.0
    return 1 - loss / first_loss


def _judge_share(gap: Gap, *, per_seed: Losses, fall: float) -> Gap:
    """Return a gap with its share of the baseline's loss, and the verdict on the share.

    Args:
        gap: The gap without a share.
        per_seed: (seeds,), the share of each seed.
        fall: As for `_decide`.
    """
    low, high = compute_interval(per_seed)
    decision = _decide(per_seed, low, high, gate=gap.gate, fall=fall, bit_equal=gap.bit_equal)
    return replace(
        gap,
        verdict=decision.verdict,
        reason=decision.reason,
        seeds_needed=decision.seeds_needed,
        share=float(np.mean(per_seed)),
        low=low,
        high=high,
    )


def _get_first_step(steps: Sequence[int], window_records: int) -> int:
    """Return the first step of the window, which begins after the record before it."""
    earlier = steps[:-window_records]
    if not earlier:
        return 1
    return earlier[-1] + 1


def _decide(
    per_seed: Losses,
    low: float | None,
    high: float | None,
    *,
    gate: float,
    fall: float,
    bit_equal: bool,
) -> _Decision:
    """Return the verdict on an interval of the gap.

    Args:
        per_seed: The gap of each seed, a share of the baseline's loss.
        low: Lower end of the interval. None: there is only one seed.
        high: Upper end of the interval. None: there is only one seed.
        gate: Share of the baseline's loss that a gap may reach.
        fall: Fall of the baseline's loss from the first record to the window, a share of the first.
        bit_equal: Whether every record of the recipe equals the baseline's.
    """
    if low is not None and low > gate:
        return _Decision("outside", "The whole interval is above the gate.")
    if high is not None and high < -gate:
        return _Decision("outside", "The whole interval is below the gate.")
    if fall < MIN_LOSS_FALL_IN_GATES * gate:
        reason = (
            f"The baseline's own loss fell by {100 * fall:.2g} % only, and a recipe that learns "
            f"nothing would pass a gate of {100 * gate:g} %. Train longer."
        )
        return _Decision("cannot tell", reason)
    if bit_equal:
        return _Decision("within", "Every loss is the baseline's, bit for bit.")
    if low is None or high is None:
        return _Decision("cannot tell", "One seed has no interval. 2 seeds are the least.", 2)
    if -gate <= low and high <= gate:
        return _Decision("within", "The whole interval is inside the gate.")
    needed = estimate_seeds_needed(per_seed, gate)
    if needed is None:
        reason = f"The gap is too near to the gate: more than {MAX_SEEDS} seeds would be needed."
    else:
        reason = (
            f"The interval reaches across the gate. With this spread about {needed} seeds tell."
        )
    return _Decision("cannot tell", reason, needed)


def parse_gate(text: str) -> float:
    """Return the share of a text such as "1%" or "0.5%".

    Raises:
        RunConfigError: The text is not a share between 0 and 100 %.
    """
    share = math.nan
    if re.fullmatch(r"\d*\.?\d+%", text):
        share = float(text[:-1]) / 100
    if not 0 < share < 1:
        raise RunConfigError.of(
            "gate", "must be a share of the baseline's loss", text, "Write gate=1%."
        )
    return share


def compute_interval(values: Losses) -> tuple[float | None, float | None]:
    """Return both ends of the t-interval of the mean of independent values.

    Both are None for a single value.
    """
    if len(values) < 2:
        return None, None
    half = _compute_half_width(float(np.std(values, ddof=1)), len(values))
    mean = float(np.mean(values))
    return mean - half, mean + half


def _compute_half_width(deviation: float, count: int) -> float:
    """Return half the width of the t-interval of a mean."""
    # scipy is heavy, and only the extra `train` installs it.
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    return float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * deviation / math.sqrt(count)


def estimate_seeds_needed(per_seed: Losses, gate: float) -> int | None:
    """Return how many seeds would show on which side of the gate the mean is, with this spread.

    The result is None if more than `MAX_SEEDS` would be needed.
    """
    distance = abs(gate - abs(float(np.mean(per_seed))))
    deviation = float(np.std(per_seed, ddof=1))
    for count in range(len(per_seed) + 1, MAX_SEEDS + 1):
        if _compute_half_width(deviation, count) < distance:
            return count
    return None


def _average_weighted(rows: Losses, weights: Losses) -> Losses:
    """Return the weighted mean of the last columns of each row, as many as there are weights."""
    return np.average(rows[:, -len(weights) :], axis=1, weights=weights)


def _make_gap_curve(baseline_losses: Losses, differences: Losses, steps: Sequence[int]) -> GapCurve:
    """Return the gap in up to `MAX_CURVE_POINTS` blocks of steps.

    A block in which the baseline's loss is not above 0 is left out.

    Args:
        baseline_losses: (seeds, steps).
        differences: (seeds, steps), loss of the recipe minus loss of the baseline.
        steps: Steps of the columns.
    """
    weights = np.diff(steps, prepend=0).astype(np.float64)
    ends: list[int] = []
    means: list[float] = []
    lows: list[float] = []
    highs: list[float] = []
    for block in np.array_split(np.arange(len(steps)), min(MAX_CURVE_POINTS, len(steps))):
        block_weights = weights[block]
        level = np.average(baseline_losses[:, block], axis=1, weights=block_weights).mean()
        if level <= 0:
            continue
        per_seed = np.average(differences[:, block], axis=1, weights=block_weights) / level
        mean = float(per_seed.mean())
        low, high = compute_interval(per_seed)
        if low is None or high is None:  # with one seed the curve has no width
            low, high = mean, mean
        ends.append(int(steps[block[-1]]))
        means.append(mean)
        lows.append(low)
        highs.append(high)
    return GapCurve(steps=tuple(ends), mean=tuple(means), low=tuple(lows), high=tuple(highs))
