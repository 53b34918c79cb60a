"""Logs of other trainers as arms of a comparison, and what the comparison says it does not know."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bridge.runtime.audit.run_log import LogRecord, RunLog
from bridge.runtime.compare.gap import LossCurve, find_common_steps
from bridge.runtime.compare.log_comparison import compare_logs
from bridge.runtime.compare.logged_run import LoggedRun, find_warm_up, make_curve

STEPS = range(1, 41)
FIELDS = {"model.num_layers": 16, "optimizer.lr": 3e-4, "model.fp8": None}


def log(name: str, *, factor: float = 1.0, seed: int | None = None, every: int = 1, **more: object) -> RunLog:
    arguments = {} if seed is None else {"seed": seed}
    records = []
    for step in STEPS:
        if step % every == 0:
            records.append(LogRecord(step=step, loss=(2 + 8 / step) * factor, learning_rate=1e-4, skipped=0))
    settings = {"path": Path(f"{name}.log"), "source": "a log of Megatron-LM", "is_sampled": True, **more}
    return RunLog(name=name, train=tuple(records), arguments=arguments, **settings)


def run(log: RunLog, precision: str = "", **fields: object) -> LoggedRun:
    described = FIELDS | {name.replace("__", "."): value for name, value in fields.items()} if precision else {}
    return LoggedRun(log=log, name=log.name, precision=precision, fields=described)


def test_one_log_for_each_precision_cannot_tell_and_names_the_gate_of_others() -> None:
    runs = [run(log("a", seed=1), "bf16"), run(log("b", factor=1.002, seed=1), "fp8", model__fp8="hybrid")]
    comparison = compare_logs(runs)
    _, row = comparison.rows
    assert (row.label, row.gap.verdict, row.gap.seeds_needed) == ("fp8", "cannot tell", 2)
    assert comparison.notes == (
        "Twins as far as the arguments show: 2 of them are equal, and those that differ are of the precision "
        "(model.fp8).",
        "fp8 is compared with bf16 at the 40 steps from 1 to 40 that both have.",
        "Not in any log: gradient norm, loss scale, throughput.",
        "The gate is 1 % of the baseline's loss. Others hold the difference in nats per token against 0.01 (marin "
        "issue 7298, Megatron-LM issue 1152); here it is fp8 +0.0045.",
    )


def test_logs_of_equal_precision_and_other_seeds_are_one_recipe() -> None:
    runs = [run(log(f"a{seed}", seed=seed), "bf16") for seed in (1, 2, 3)]
    runs += [run(log(f"b{seed}", factor=1 + seed / 1000, seed=seed), "fp8") for seed in (1, 2, 3)]
    _, row = compare_logs(runs).rows
    assert (row.gap.verdict, row.gap.seeds, len(row.arms)) == ("within", 3, 3)


def test_logs_without_a_seed_are_recipes_by_themselves() -> None:
    runs = [run(log("a")), run(log("b", factor=1.1)), run(log("c"))]
    comparison = compare_logs(runs)
    assert [row.label for row in comparison.rows] == ["a", "b", "c"]
    assert [row.gap.verdict for row in comparison.rows[1:]] == ["cannot tell", "within"]
    assert comparison.notes[0] == "Whether the runs are twins is not known: no arguments of a, b, c."


def test_two_logs_of_one_precision_and_seed_are_named_by_their_files() -> None:
    runs = [run(log("h100", seed=1), "fp8"), run(log("gb200", factor=1.001, seed=1), "fp8")]
    assert [row.label for row in compare_logs(runs).rows] == ["fp8 (h100)", "fp8 (gb200)"]


def test_seeds_that_differ_are_no_pair() -> None:
    runs = [run(log("a", seed=1), "bf16"), run(log("b", seed=2), "fp8")]
    _, row = compare_logs(runs).rows
    assert row.gap.reason == "No seed was run with both recipes."


def test_arguments_that_differ_and_are_not_of_the_precision_are_named() -> None:
    runs = [run(log("a", seed=1), "bf16"), run(log("b", seed=1), "fp8", model__fp8="hybrid", optimizer__lr=1e-3)]
    assert compare_logs(runs).notes[0] == (
        "No twins, as these arguments differ too: optimizer.lr. A gap need not be that of the precision. "
        "1 arguments are equal."
    )


def test_single_steps_are_compared_at_the_steps_that_both_logs_have() -> None:
    runs = [run(log("a")), run(log("b", every=5))]
    _, row = compare_logs(runs).rows
    assert (row.gap.share, row.gap.window) == (0.0, (21, 40))
    sampled = LossCurve(steps=(1, 2, 4), losses=(4.0, 3.0, 2.0), is_sampled=True)
    means = replace(sampled, is_sampled=False)
    assert (sampled.average_losses([4]).tolist(), means.average_losses([4]).tolist()) == ([2.0], [2.75])
    assert find_common_steps([sampled, means]) == [1, 2, 4]


def test_a_mean_and_a_single_step_of_unequal_records_are_not_the_same_loss() -> None:
    runs = [run(log("a", every=5)), run(log("b", every=5, is_sampled=False))]
    assert any("has the loss of single steps" in note for note in compare_logs(runs).notes)
    runs = [run(log("a")), run(log("b", is_sampled=False))]
    assert not any("has the loss of single steps" in note for note in compare_logs(runs).notes)


def test_logs_without_a_common_step_cannot_be_compared() -> None:
    odd, even = log("a"), log("b")
    odd = replace(odd, train=odd.train[::2])
    even = replace(even, train=even.train[1::2])
    comparison = compare_logs([run(odd), run(even)])
    assert comparison.rows[1].gap.reason == "The runs have no step of which each has a record."
    assert "b has no record at a step of a." in comparison.notes


def test_the_loss_of_a_policy_gradient_is_not_judged() -> None:
    runs = [run(log("a", is_policy=True)), run(log("b", factor=2.0, is_policy=True))]
    gap = compare_logs(runs).rows[1].gap
    assert (gap.verdict, gap.reason.startswith("The loss of a policy gradient need not fall")) == ("cannot tell", True)
    lost = log("b", factor=float("nan"), is_policy=True)
    assert compare_logs([run(log("a", is_policy=True)), run(lost)]).verdicts == {"outside"}


def test_a_loss_that_is_lost_is_outside_and_skipped_steps_are_no_records() -> None:
    lost = log("b")
    lost = replace(lost, train=(*lost.train[:-1], replace(lost.train[-1], loss=float("nan"))))
    assert compare_logs([run(log("a")), run(lost)]).verdicts == {"outside"}
    skipped = replace(lost, train=(replace(lost.train[0], loss=None), *lost.train[1:]))
    assert make_curve(skipped).steps[0] == 2


@pytest.mark.parametrize(
    ("rates", "arguments", "warm_up"),
    [
        ((1e-4, 2e-4, 3e-4, 3e-4), {}, 3),
        ((3e-4, 2e-4, 1e-4, 1e-4), {"lr_warmup_iters": 100}, 0),
        ((None,) * 4, {"lr_warmup_iters": 100}, 100),
        ((None,) * 4, {"lr_warmup_fraction": 0.01, "train_iters": 500, "lr_warmup_iters": 0}, 5),
        ((None,) * 4, {}, None),
    ],
)
def test_the_warm_up_ends_where_the_learning_rate_no_longer_rises(
    rates: tuple[float | None, ...], arguments: dict[str, object], warm_up: int | None
) -> None:
    records = [LogRecord(step=step, loss=3.0, learning_rate=rate) for step, rate in enumerate(rates, start=1)]
    assert find_warm_up(replace(log("a"), train=tuple(records), arguments=arguments)) == warm_up
