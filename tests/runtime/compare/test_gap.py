"""Verdicts on gaps between loss curves, against the definition written out and SciPy's own interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bridge.runtime.compare.gap import LossCurve, estimate_seeds_needed, judge_gap

STEPS = tuple(range(5, 101, 5))
WARM_UP = 20


def curve(seed: int, *, factor: float = 1.0, noise: float = 0.0, steps: tuple[int, ...] = STEPS) -> LossCurve:
    """Return a falling loss; each seed has its own data, equal for every recipe."""
    data = np.random.default_rng(seed).normal(0, 0.05, len(steps))
    own = np.random.default_rng(1000 + seed).normal(0, noise, len(steps)) if noise else 0
    losses = (2 + 3 * np.exp(-np.asarray(steps) / 30) + data) * factor + own
    return LossCurve(steps=steps, losses=tuple(losses.tolist()))


def pairs(count: int, **recipe: float) -> list[tuple[LossCurve, LossCurve]]:
    return [(curve(seed), curve(seed, **recipe)) for seed in range(count)]


losses = st.lists(st.floats(0.01, 20) | st.just(math.nan), min_size=1, max_size=30)


@given(losses, st.integers(1, 4), st.integers(0, 40), st.integers(1, 10))
def test_identical_arms_never_fail(values: list[float], seeds: int, warm_up: int, interval: int) -> None:
    one = LossCurve(steps=tuple(range(interval, interval * len(values) + 1, interval)), losses=tuple(values))
    found = judge_gap([(one, one)] * seeds, warm_up=warm_up)
    assert found.verdict != "outside"
    if found.verdict == "within":
        assert found.bit_equal
        assert found.share == 0
        assert found.reason == "Every loss is the baseline's, bit for bit."
        assert values[0] > found.baseline_loss > 0  # the loss has moved


@given(st.floats(1.03, 3), st.integers(2, 5))
def test_a_broken_recipe_is_outside_with_two_seeds(factor: float, seeds: int) -> None:
    found = judge_gap(pairs(seeds, factor=factor), warm_up=WARM_UP)
    assert (found.verdict, found.reason) == ("outside", "The whole interval is above the gate.")
    assert found.share == pytest.approx(factor - 1)


def test_a_two_step_run_cannot_tell_and_says_how_many_steps_would() -> None:
    short = LossCurve(steps=(2,), losses=(5.5,))
    worse = LossCurve(steps=(2,), losses=(9.0,))
    found = judge_gap([(short, worse)] * 3, warm_up=20)
    assert (found.verdict, found.share) == ("cannot tell", None)
    assert found.reason == (
        "2 steps with a warm-up of 20 and a record every 2 are too few. 32 steps would do, or a shorter "
        "logging.log_interval."
    )
    enough = tuple(range(2, 33, 2))
    assert judge_gap([(curve(seed, steps=enough),) * 2 for seed in range(3)], warm_up=20).verdict == "within"


def test_a_flat_line_is_no_success() -> None:
    rng = np.random.default_rng(0)
    flat = [LossCurve(steps=STEPS, losses=tuple((5.5 + rng.normal(0, 0.001, 20)).tolist())) for _ in range(6)]
    found = judge_gap(list(zip(flat[:3], flat[3:], strict=True)), warm_up=WARM_UP)
    assert found.verdict == "cannot tell"
    assert found.reason.startswith("The baseline's own loss fell by")
    assert judge_gap([(one, one) for one in flat], warm_up=WARM_UP).verdict == "cannot tell"
    learning = [(curve(seed), flat[seed]) for seed in range(2)]
    assert judge_gap(learning, warm_up=WARM_UP).verdict == "outside"


def test_the_interval_is_the_paired_t_interval_of_the_last_half() -> None:
    both = pairs(4, factor=1.004, noise=0.05)
    found = judge_gap(both, warm_up=WARM_UP)
    assert found.window == (61, 100)
    chosen = [step > 60 for step in STEPS]
    base = np.array([one.losses for one, _ in both])[:, chosen]
    gaps = (np.array([other.losses for _, other in both])[:, chosen] - base).mean(axis=1) / base.mean()
    expected = stats.ttest_1samp(gaps, 0).confidence_interval(0.90)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.over_steps is not None
    assert len(found.over_steps.steps) == len(STEPS)


def test_more_seeds_are_asked_for_where_they_would_tell() -> None:
    noisy = judge_gap(pairs(2, noise=0.3), warm_up=WARM_UP)
    assert noisy.verdict == "cannot tell"
    assert noisy.seeds_needed is None or noisy.seeds_needed > 2
    needed = estimate_seeds_needed(np.array([-0.01, 0.01]), gate=0.01)
    assert needed is not None
    half = [stats.t.ppf(0.95, count - 1) * math.sqrt(2) * 0.01 / math.sqrt(count) for count in (needed - 1, needed)]
    assert half[0] >= 0.01 > half[1]
    assert estimate_seeds_needed(np.array([0.0099, 0.0101]), gate=0.01) is None
    one = judge_gap(pairs(1, noise=0.01), warm_up=WARM_UP)
    assert (one.verdict, one.seeds_needed, one.low) == ("cannot tell", 2, None)


def test_a_lost_loss_is_outside_and_a_lost_baseline_tells_nothing() -> None:
    sound = curve(1)
    lost = LossCurve(steps=STEPS, losses=(*sound.losses[:7], *[math.nan] * 13))
    found = judge_gap([(sound, sound), (sound, lost)], warm_up=WARM_UP)
    assert (found.verdict, found.reason) == ("outside", "Its loss is not finite from step 40 on in 1 of 2 seeds.")
    assert judge_gap([(lost, sound)], warm_up=WARM_UP).verdict == "cannot tell"


def test_records_of_skipped_steps_do_not_shift_the_comparison() -> None:
    regular = LossCurve(steps=(10, 20, 30), losses=(5.0, 4.0, 3.0))
    with_skip = LossCurve(steps=(10, 13, 20, 30), losses=(5.0, 6.0, 4.0 - 2 * 3 / 7, 3.0))
    assert with_skip.average_losses((10, 20, 30)) == pytest.approx(regular.losses)


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ((20,), "at step 20"),
        ((20, 30), "at steps 20 and 30"),
        ((20, 30, 40, 50, 60), "at steps 20, 30, 40 and 2 more"),
        ((95, 100), "from step 95 on"),
        ((20, 100), "at step 20 and from step 100 on"),
    ],
)
def test_a_lost_loss_is_told_with_its_steps(lost: tuple[int, ...], words: str) -> None:
    sound = curve(1)
    values = [math.nan if step in lost else loss for step, loss in zip(STEPS, sound.losses, strict=True)]
    broken = LossCurve(steps=STEPS, losses=tuple(values))
    assert judge_gap([(sound, broken)], warm_up=WARM_UP).reason == f"Its loss is not finite {words} in 1 of 1 seeds."
    assert judge_gap([(broken, sound)], warm_up=WARM_UP).reason == f"The baseline's own loss is not finite {words}."
