"""Runs of a sweep put together: twins, the baseline, runs that failed or did not end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bridge.runtime.compare.arm import Arm
from bridge.runtime.compare.comparison import compare_arms
from tests.runtime.compare.test_gap import WARM_UP, curve


def arm(recipe: str, seed: int, *, factor: float = 1.0, lr: float = 1e-3) -> Arm:
    """Return a run that came to its end."""
    return Arm(
        folder=Path(f"{recipe}-{seed}"),
        label=recipe,
        precision={"mixed_precision._recipe_": recipe},
        rest={"optimizer.lr": lr, "train.global_batch_size": 4, "model.seq_length": 8},
        seed=(seed, seed),
        warm_up=WARM_UP,
        curve=curve(seed, factor=factor),
        summary={"skipped_steps": 1, "tokens_per_second": 64.0, "validation_loss": 2.0},
    )


def test_runs_that_differ_in_more_than_precision_and_seed_are_compared_apart() -> None:
    arms = [arm(recipe, seed, lr=lr) for lr in (1e-3, 3e-4) for recipe in ("a", "b") for seed in (1, 2)]
    found = compare_arms(arms)
    assert [dict(comparison.where) for comparison in found] == [{"optimizer.lr": 1e-3}, {"optimizer.lr": 3e-4}]
    for comparison in found:
        baseline, other = comparison.rows
        assert (baseline.label, other.label, other.differs_in) == ("a", "b", ("mixed_precision._recipe_",))
        assert comparison.verdicts == {"within"}
        assert (other.metrics["step_seconds"], other.metrics["skipped_steps"]) == (0.5, 2)


def test_a_run_that_failed_is_outside_and_one_that_did_not_end_tells_nothing() -> None:
    sound = [arm("a", 1), arm("a", 2)]
    failed = replace(arm("b", 1), failure="audit: step 2 must run what is planned.")
    stopped = replace(arm("c", 1), summary={})
    _, second, third = compare_arms([*sound, failed, arm("b", 2), stopped])[0].rows
    assert second.sentence("a") == (
        "b: outside 1 %. The run failed in 1 of 2 seeds. audit: step 2 must run what is planned."
    )
    assert third.sentence("a") == "c: cannot tell. No seed was run with both recipes. c-1 did not end."
    lost = replace(stopped, curve=replace(stopped.curve, losses=(*stopped.curve.losses[:-1], float("nan"))))
    assert compare_arms([*sound, lost])[0].verdicts == {"outside"}
