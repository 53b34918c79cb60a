"""Logs that Megatron-LM and Megatron Bridge print, with lines that their own functions printed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bridge.read.logs.files import read_logs
from bridge.runtime.audit.run_log import RunLog

SAMPLES = Path(__file__).parent / "samples"
OLD = (
    "3:  iteration {step:8d}/     100 | consumed samples: {samples:12d} | elapsed time per iteration (ms): 5103.0 | "
    "learning rate: 4.000E-07 | global batch size:   256 | {loss}loss scale: 1.0 | grad norm: {norm} | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
"""A line as releases before 0.8 print it, behind the number of a rank."""


def log_of(name: str) -> RunLog:
    (log,) = read_logs(SAMPLES / name)
    return log


def written(tmp_path: Path, text: str) -> RunLog:
    path = tmp_path / "train.log"
    path.write_text(text)
    (log,) = read_logs(path)
    return log


def old_line(step: int, loss: float | None = 3.0, norm: float = 1.0) -> str:
    cell = ""
    if loss is not None:
        cell = f"lm loss: {loss:.6E} | "
    return OLD.format(step=step, samples=256 * step, loss=cell, norm=norm)


def test_a_log_has_its_losses_figures_arguments_and_validations() -> None:
    log = log_of("megatron_lm_bf16.log")
    assert (log.source, log.name, log.train_iters, log.has_ended) == (
        "a log of Megatron-LM",
        "megatron_lm_bf16",
        40,
        True,
    )
    assert [record.step for record in log.train[:3]] == [1, 2, 4]
    last = log.train[-1]
    assert (last.step, last.loss, last.grad_norm, last.loss_scale, last.skipped) == (40, 2.267325, 1.75, 1.0, 0)
    assert (last.learning_rate, last.seconds_per_step, last.tflops_per_gpu) == (0.00015, 2.1, 59.5)
    assert last.tokens_per_second == pytest.approx(32 * 4096 / 2.1)
    assert log.validation == ((40, 2.31),)
    assert (log.get_seed(), log.arguments["bf16"], log.arguments["fp8"]) == (1234, True, None)
    assert log.missing == []


def test_steps_that_were_all_skipped_have_no_loss_and_are_counted_once() -> None:
    log = log_of("megatron_lm_fp16.log")
    assert [(record.step, record.skipped) for record in log.train] == [(1, 0), (10, 10), (20, 2), (30, 0), (40, 0)]
    assert [record.loss is None for record in log.train] == [True, True, False, False, False]
    assert log.skipped_steps == 12
    assert [row["step"] for row in log.list_records()] == [20, 30, 40]


def test_a_skipped_step_between_others_prints_zero_and_is_no_loss_of_zero(tmp_path: Path) -> None:
    skipped = old_line(4, 0.0).replace("skipped iterations:   0", "skipped iterations:   1")
    log = written(tmp_path, "".join([old_line(3), skipped, old_line(5)]))
    assert [record.loss for record in log.train] == [3.0, None, 3.0]
    assert log.skipped_steps == 1


def test_a_line_without_a_loss_whose_steps_were_not_skipped_is_a_nan(tmp_path: Path) -> None:
    log = log_of("megatron_lm_nan.log")
    assert [math.isnan(record.loss) for record in log.train] == [False, False, False, True, True]
    log = written(tmp_path, "".join([old_line(1), old_line(2, None, math.nan), old_line(3, math.inf)]))
    assert [str(record.loss) for record in log.train] == ["3.0", "nan", "inf"]
    assert [row["loss"] for row in log.list_records()] == [3.0, None, None]
    assert log.list_records()[1]["not_finite"] == "at step 2"


def test_a_log_of_megatron_bridge_is_known_by_a_line_of_its_own() -> None:
    log = log_of("megatron_bridge.log")
    assert log.source == "a log of Megatron Bridge"
    assert [record.step for record in log.train] == [10, 20, 30, 40, 50, 60]
    assert log.missing_sentence == "Not in this log: arguments (precision and seed)."


def test_a_run_that_was_started_again_counts_with_its_later_records(tmp_path: Path) -> None:
    first = "".join(old_line(step, 4.0) for step in (1, 2, 3, 4))
    again = "".join(old_line(step, 2.0) for step in (3, 4, 5))
    log = written(tmp_path, first + again)
    assert [(record.step, record.loss) for record in log.train] == [(1, 4.0), (2, 4.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    assert log.notes == ("The run was started again: of steps 3 to 4 the last record counts.",)


def test_the_loss_of_the_test_set_is_no_validation(tmp_path: Path) -> None:
    lines = [old_line(1), old_line(2)]
    lines += [" validation loss at iteration 2 | lm loss value: 2.5E+00 | lm loss PPL: 1.2E+01 | \n"]
    lines += [" validation loss at iteration 2 on test set | lm loss value: 9.5E+00 | lm loss PPL: 1.2E+01 | \n"]
    assert written(tmp_path, "".join(lines)).validation == ((2, 2.5),)


def test_a_last_line_without_its_end_is_left_out_and_named(tmp_path: Path) -> None:
    whole = old_line(1) + old_line(2)
    log = written(tmp_path, whole + old_line(3).rstrip("\n"))
    assert [record.step for record in log.train] == [1, 2]
    assert log.notes == ("Its last line has no end, so that it may be cut, and was left out.",)
    assert written(tmp_path, whole).notes == ()
