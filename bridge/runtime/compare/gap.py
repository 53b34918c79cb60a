"""The gap between the losses of two recipes, and the verdict on it.

Two runs of one seed see the same batches from the same weights. Their difference is free of the
noise of the data, so the gap is estimated from differences, one per seed:

    d_s   mean over the window of (loss of the recipe - loss of the baseline), of seed s
    gap   mean of d_s, divided by the baseline's mean loss in the window
    t-interval of n seeds:   gap +- t(0.95, n - 1) * sd(d_s) / sqrt(n)

It leaves 5 % on each side (90 % in all), as both verdicts are one-sided tests at that level: two
for *within* (TOST).

The window is the last half of the steps after the warm-up: a gap that opens late counts in full.
The verdict is *outside* where the whole interval is beyond the gate, *within* where the whole
interval is inside, *cannot tell* otherwise. No verdict is *within* where the baseline itself
learned little: a recipe that learns nothing would pass.
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
WINDOW_SHARE = 0.5
"""Share of the steps after the warm-up that is judged, the last ones."""
MIN_RECORDS = 3
"""Records in the window below which nothing is judged."""
MIN_LOSS_FALL_IN_GATES = 2
"""The baseline's loss must have fallen by this many gates: more than a recipe may lose."""
MAX_SEEDS = 100
MAX_CURVE_POINTS = 24
"""Points over the steps, at most, for the picture."""
LOG_INTERVAL_SETTING = "logging.log_interval"
"""The setting of our own runs that decides how often a loss is recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCurve:
    """The training loss of a run over its steps.

    A record is the mean loss of the steps since the record before, or the loss of its step alone.
    """

    steps: tuple[int, ...]
    """Last step of each record, increasing, from 1 on."""
    losses: tuple[float, ...]
    """In nats per token; NaN where the loss was not finite."""
    is_sampled: bool = False
    """Whether each loss is that of its step alone."""

    def over(self, boundaries: Sequence[int]) -> Losses:
        """Return the loss of each interval that ends at one of these steps of the curve.

        It is the mean over the interval: a skipped step has a record of its own, so two runs can
        have records at different steps. Of single steps it is the loss of the last step, as runs
        that record different steps have those at the boundaries in common alone.
        """
        steps = np.asarray(self.steps)
        if self.is_sampled:
            return np.asarray(self.losses)[np.searchsorted(steps, np.asarray(boundaries))]
        weights = np.diff(steps, prepend=0)
        # The records after the last boundary come last.
        interval = np.searchsorted(np.asarray(boundaries), steps)
        count = len(boundaries) + 1
        sums = np.bincount(interval, weights=weights * np.asarray(self.losses), minlength=count)
        return sums[:-1] / np.bincount(interval, weights=weights, minlength=count)[:-1]

    def find_first_lost(self) -> int | None:
        """Return the step of the first record without a finite loss, None where all are finite."""
        for step, loss in zip(self.steps, self.losses, strict=True):
            if not math.isfinite(loss):
                return step
        return None


def find_common_steps(curves: Sequence[LossCurve]) -> list[int]:
    """Return the steps at which every one of the curves has a record."""
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
    """The gap over the steps: mean over the seeds, and its interval.

    They are shares of the baseline's loss.
    """

    steps: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """The gap of one recipe."""

    verdict: Verdict
    reason: str
    """Why the verdict is so, as a sentence."""
    seeds: int
    """Seeds that both recipes ran."""
    gate: float
    window: tuple[int, int] | None = None
    """First and last step that were judged; None where no step was judged."""
    baseline_loss: float | None = None
    """Mean over seeds and window."""
    loss: float | None = None
    share: float | None = None
    """The gap as a share of the baseline's loss; positive where the recipe's loss is higher.

    None where nothing was judged, or the baseline's loss is not above zero.
    """
    low: float | None = None
    """Lower end of the interval; None with one seed."""
    high: float | None = None
    bit_equal: bool = False
    """Every record of the recipe is the baseline's."""
    seeds_needed: int | None = None
    """Seeds that would tell with this spread, where more are needed and at most `MAX_SEEDS`."""
    over_steps: GapCurve | None = None


def judge_gap(
    pairs: Pairs,
    *,
    warm_up: int,
    gate: float = DEFAULT_GATE,
    interval_setting: str = LOG_INTERVAL_SETTING,
) -> Gap:
    """Return the gap of a recipe, from one pair per seed that both ran, and the verdict on it.

    The steps of the learning rate's `warm_up` are not judged. `interval_setting` is the setting of
    the runs that decides how often a loss is recorded.
    """
    curves: list[LossCurve] = []
    lost: list[LossCurve] = []
    lost_baselines: list[LossCurve] = []
    for baseline, recipe in pairs:
        curves += [baseline, recipe]
        if recipe.find_first_lost() is not None:
            lost.append(recipe)
        if baseline.find_first_lost() is not None:
            lost_baselines.append(baseline)
    steps = find_common_steps(curves)
    verdict: Verdict = "cannot tell"
    reason: str | None
    if not pairs:
        reason = "No seed was run with both recipes."
    elif lost_baselines:
        reason = f"The baseline's own loss is not finite {_describe_lost_curves(lost_baselines)}."
    elif lost:
        verdict = "outside"
        seeds = f"{len(lost)} of {len(pairs)} seeds"
        reason = f"Its loss is not finite {_describe_lost_curves(lost)} in {seeds}."
    elif not steps and all(curve.steps for curve in curves):
        reason = "The runs have no step of which each has a record."
    else:
        reason = describe_too_short(steps, warm_up, interval_setting)
    if reason is not None:
        return Gap(verdict=verdict, reason=reason, seeds=len(pairs), gate=gate)
    return _judge_finite(pairs, steps, _select_window(steps, warm_up), gate)


def _describe_lost_curves(curves: Iterable[LossCurve]) -> str | None:
    """Return at which steps the loss of any of these curves is not finite."""
    finite_at: dict[int, bool] = {}
    for curve in curves:
        for step, loss in zip(curve.steps, curve.losses, strict=True):
            finite_at[step] = finite_at.get(step, True) and math.isfinite(loss)
    return describe_lost_steps(dict(sorted(finite_at.items())))


def _select_window(steps: Sequence[int], warm_up: int) -> list[int]:
    """Return the steps that are judged: the last share `WINDOW_SHARE` of those after the warm-up."""
    after = [step for step in steps if step > warm_up]
    return after[int(len(after) * (1 - WINDOW_SHARE)) :]


def describe_too_short(
    steps: Sequence[int], warm_up: int, interval_setting: str = LOG_INTERVAL_SETTING
) -> str | None:
    """Return why runs with a record at these steps are too short, and how long they have to be.

    The result is None for runs that are long enough to be judged.
    """
    if len(_select_window(steps, warm_up)) >= MIN_RECORDS:
        return None
    interval, seen = 1, 0
    if steps:
        interval = _get_record_interval(steps)
        seen = steps[-1] - max(0, steps[0] - interval)
    needed = math.ceil((warm_up + interval * MIN_RECORDS / WINDOW_SHARE) / interval) * interval
    shorter = ""
    if interval > 1:
        shorter = f", or a shorter {interval_setting}"
    return (
        f"{seen} steps with a warm-up of {warm_up} and a record every {interval} are too few. "
        f"{needed} steps would do{shorter}."
    )


def _get_record_interval(steps: Sequence[int]) -> int:
    """Return the steps between two records.

    The first record does not show it in a log that begins in the middle of a run, or that has the
    first step by itself.
    """
    if len(steps) < 3:
        return steps[0]
    distances = []
    for earlier, later in pairwise(steps):
        distances.append(later - earlier)
    return median_high(distances)


def _judge_finite(pairs: Pairs, steps: list[int], window_steps: list[int], gate: float) -> Gap:
    """Return the gap of finite losses, judged in the window of the chosen steps."""
    weights = np.diff(steps, prepend=0).astype(np.float64)[-len(window_steps) :]
    baseline_losses, losses = [], []
    for baseline, recipe in pairs:
        baseline_losses.append(baseline.over(steps))
        losses.append(recipe.over(steps))
    base = np.stack(baseline_losses)
    difference = np.stack(losses) - base
    level = float(np.mean(_average_weighted(base, weights)))
    earlier = steps[: -len(window_steps)]
    first = 1
    if earlier:
        first = earlier[-1] + 1
    bit_equal = all(baseline == recipe for baseline, recipe in pairs)
    without_share = Gap(
        verdict="cannot tell",
        reason=(
            f"The mean of the baseline's loss in steps {first} to {window_steps[-1]} is {level:g}, "
            "and a gap is a share of a loss above 0."
        ),
        seeds=len(pairs),
        gate=gate,
        window=(first, window_steps[-1]),
        baseline_loss=level,
        loss=level + float(np.mean(_average_weighted(difference, weights))),
        bit_equal=bit_equal,
    )
    if level <= 0:
        return without_share
    per_seed = _average_weighted(difference, weights) / level
    first_level = float(np.mean(base[:, 0]))
    fall = 0.0
    if first_level > 0:
        fall = 1 - level / first_level
    low, high = compute_interval(per_seed)
    decision = _decide(per_seed, low, high, gate=gate, fall=fall, bit_equal=bit_equal)
    return replace(
        without_share,
        verdict=decision.verdict,
        reason=decision.reason,
        seeds_needed=decision.seeds_needed,
        share=float(np.mean(per_seed)),
        low=low,
        high=high,
        over_steps=_make_gap_curve(base, difference, steps),
    )


class _Decision(NamedTuple):
    """The verdict on a gap, and what it rests on."""

    verdict: Verdict
    reason: str
    seeds_needed: int | None = None


def _decide(
    per_seed: Losses,
    low: float | None,
    high: float | None,
    *,
    gate: float,
    fall: float,
    bit_equal: bool,
) -> _Decision:
    """Return the verdict on an interval of the gap: outside, within or cannot tell."""
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
    """Return the share that a text such as "1%" or "0.5%" names.

    Raises:
        RunConfigError: It is no share between 0 and 100 %.
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
    """Return the t-interval of the mean of independent values, None and None for one value."""
    if len(values) < 2:
        return None, None
    half = _compute_half_width(float(np.std(values, ddof=1)), len(values))
    mean = float(np.mean(values))
    return mean - half, mean + half


def _compute_half_width(deviation: float, count: int) -> float:
    """Return half the width of the t-interval of a mean."""
    # scipy is of the extra `train`, and heavy.
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    return float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * deviation / math.sqrt(count)


def estimate_seeds_needed(per_seed: Losses, gate: float) -> int | None:
    """Return how many seeds tell on which side of the gate this mean is, at this spread.

    The result is None where more than `MAX_SEEDS` would be needed.
    """
    distance = abs(gate - abs(float(np.mean(per_seed))))
    deviation = float(np.std(per_seed, ddof=1))
    for count in range(len(per_seed) + 1, MAX_SEEDS + 1):
        if _compute_half_width(deviation, count) < distance:
            return count
    return None


def _average_weighted(rows: Losses, weights: Losses) -> Losses:
    """Return the mean of the last columns of each row, weighted."""
    return np.average(rows[:, -len(weights) :], axis=1, weights=weights)


def _make_gap_curve(base: Losses, difference: Losses, steps: Sequence[int]) -> GapCurve:
    """Return the gap of each of up to `MAX_CURVE_POINTS` blocks of steps whose baseline's loss is above 0."""
    weights = np.diff(steps, prepend=0).astype(np.float64)
    ends: list[int] = []
    means: list[float] = []
    lows: list[float] = []
    highs: list[float] = []
    for block in np.array_split(np.arange(len(steps)), min(MAX_CURVE_POINTS, len(steps))):
        level = np.average(base[:, block], axis=1, weights=weights[block]).mean()
        if level <= 0:
            continue
        per_seed = np.average(difference[:, block], axis=1, weights=weights[block]) / level
        mean = float(per_seed.mean())
        low, high = compute_interval(per_seed)
        if low is None or high is None:  # with one seed the curve has no width
            low, high = mean, mean
        ends.append(int(steps[block[-1]]))
        means.append(mean)
        lows.append(low)
        highs.append(high)
    return GapCurve(steps=tuple(ends), mean=tuple(means), low=tuple(lows), high=tuple(highs))
