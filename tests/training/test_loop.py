"""One process: what a run writes, shows, refuses and survives."""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import logging
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bridge.errors import RunConfigError, TrainingError
from bridge.runtime.megatron import cuda_shim, wide_gemm
from bridge.runtime.megatron.process import training_process
from bridge.runtime.megatron.stop_request import COPY_SECONDS, StopRequest
from bridge.training.console import open_display, print_summary
from bridge.training.loop import pretrain
from bridge.training.metrics import TrainRecord, ValidationRecord
from tests.training.loop_tiny import losses, records, tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished BF16 run: folder and summary."""
    folder = tmp_path_factory.mktemp("run")
    config = tiny(train={"train_iters": 30, "eval_interval": 10})
    config.logging.tensorboard = config.logging.plots = True
    return folder, pretrain(config, run_dir=folder)


def test_run_learns(run):
    _, summary = run
    assert summary.train_loss < 4.8  # the text is that of the Python here: 3.4 with 3.11, 4.6 with 3.13
    assert summary.validation_loss < 4.0
    assert summary.iteration == summary.steps == 30
    assert summary.skipped_steps == 0
    assert 3.1 < summary.unigram_entropy < 3.4


def test_files_of_a_run(run):
    folder, summary = run
    kinds = [json.loads(line)["kind"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert kinds.count("train") == 30
    assert kinds.count("validation") == 3
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    written = json.loads((folder / "summary.json").read_text())
    assert written["validation_loss"] == summary.validation_loss
    assert written["census"][0]["kind"] == "parameters"


def test_record_of_a_step(run):
    folder, _ = run
    record = records(folder)[4]
    assert record["step"] == 5
    assert record["skipped"] is False
    assert record["consumed_samples"] == 20
    assert record["loss_scale"] == 1.0
    assert record["tokens_per_second"] > 0


def test_process_is_clean_after_a_run(run):
    assert not torch.distributed.is_initialized()
    assert not cuda_shim.is_shim_installed()
    assert not wide_gemm.is_widened(torch.bfloat16)


def test_run_leaves_the_config_as_it_was(tmp_path):
    config = tiny()
    before = [dict(vars(section)) for section in (config.model, config.optimizer, config.ddp, config.train)]
    pretrain(config, run_dir=tmp_path)
    assert [dict(vars(section)) for section in (config.model, config.optimizer, config.ddp, config.train)] == before


def test_accumulated_micro_batches_train_as_one_batch(tmp_path):
    pretrain(tiny("fp32", train={"micro_batch_size": 4}), run_dir=tmp_path / "one")
    pretrain(tiny("fp32", train={"micro_batch_size": 1}), run_dir=tmp_path / "four")
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_batch_that_is_not_whole_is_refused(tmp_path):
    with pytest.raises(RunConfigError) as raised:
        pretrain(tiny(train={"global_batch_size": 7}), run_dir=tmp_path)
    assert str(raised.value) == (
        "train.global_batch_size: must be a multiple of micro_batch_size 2 x 1 data-parallel ranks, got 7. "
        "Use 2, for example."
    )


def test_missing_section_is_refused(tmp_path):
    config = tiny()
    config.optimizer = None
    with pytest.raises(RunConfigError) as raised:
        pretrain(config, run_dir=tmp_path)
    assert str(raised.value) == "optimizer: a run needs this section, got None. Give Megatron's own config."


def test_unknown_schedule_is_refused(tmp_path):
    with pytest.raises(RunConfigError) as raised:
        pretrain(tiny(train={"lr_decay_style": "cosin"}), run_dir=tmp_path)
    assert str(raised.value) == (
        "train.lr_decay_style: must be one of cosine, linear, constant, inverse-square-root, WSD, got 'cosin'. Did you "
        "mean 'cosine'?"
    )


def test_loss_that_is_not_finite_ends_the_run_with_its_files(tmp_path):
    config = tiny(optimizer={"lr": 1e20, "min_lr": 0.0, "clip_grad": 0.0})
    config.logging.plots = True
    with pytest.raises(TrainingError, match="the loss must be finite, got nan at step") as raised:
        pretrain(config, run_dir=tmp_path)
    assert raised.value.exit_code == 1
    assert records(tmp_path)[-1]["loss"] is None
    assert (tmp_path / "loss.png").is_file()
    assert not torch.distributed.is_initialized()


def test_loss_that_is_not_finite_is_only_recorded_where_the_check_is_off(tmp_path):
    train = {"check_for_nan_in_loss": False, "eval_iters": 0}
    config = tiny(optimizer={"lr": 1e20, "min_lr": 0.0, "clip_grad": 0.0}, train=train)
    assert pretrain(config, run_dir=tmp_path).iteration == 6


def test_ctrl_c_ends_after_the_step_with_the_files_and_a_checkpoint(tmp_path, monkeypatch):
    from bridge.runtime.megatron.trainer import Trainer

    step = Trainer.step

    def interrupted(self, batches, *, stop):
        if self.scheduler.num_steps == 8:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, batches, stop=stop)

    monkeypatch.setattr(Trainer, "step", interrupted)
    before = signal.getsignal(signal.SIGINT)  # ignored where the suite runs in a shell's background
    config = tiny(save=str(tmp_path / "checkpoints"))
    config.logging.plots = True
    summary = pretrain(config, run_dir=tmp_path)
    assert summary.stop_signal == signal.SIGINT
    assert summary.iteration == 3  # the step that was running
    assert len(records(tmp_path)) == 3
    assert (tmp_path / "loss.png").is_file()
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "3\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_sigterm_without_a_folder_to_save_to_says_that_nothing_was_saved(tmp_path, monkeypatch, caplog):
    from bridge.runtime.megatron.trainer import Trainer

    step = Trainer.step

    def interrupted(self, batches, *, stop):
        os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batches, stop=stop)

    monkeypatch.setattr(Trainer, "step", interrupted)
    with caplog.at_level(logging.INFO, "bridge.training"):
        assert pretrain(tiny(), run_dir=tmp_path).stop_signal == signal.SIGTERM
    end = "Stopped on request after step 1 of 6. Nothing was saved: checkpoint.save names no folder."
    assert end in caplog.messages


def test_a_launchers_copy_of_a_signal_is_the_same_request_and_a_third_or_late_one_ends_at_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("bridge.runtime.megatron.stop_request.time.monotonic", lambda: now[0])
    for seconds, noted in (((0.0, 1.0, 2.0), (True, True, False)), ((0.0, COPY_SECONDS + 1), (True, False))):
        request = StopRequest()
        assert not request.note(signal.SIGTERM), "before the first step a signal ends the process"
        request.is_noted_only = True
        for now[0], expected in zip(seconds, noted, strict=True):
            assert request.note(signal.SIGTERM) is expected
        assert request() == signal.SIGTERM


def test_a_signal_while_a_failing_run_ends_does_not_hide_its_error(tmp_path, monkeypatch):
    monkeypatch.setattr("bridge.training.loop.plot_loss", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        with pytest.raises(TrainingError, match="the loss must be finite"):
            pretrain(tiny(optimizer={"lr": 1e20, "min_lr": 0.0, "clip_grad": 0.0}), run_dir=tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_records_are_log_lines_without_a_terminal(caplog):
    record = TrainRecord(
        step=7,
        loss=2.5,
        skipped=True,
        skipped_steps=2,
        grad_norm=None,
        loss_scale=65536.0,
        learning_rate=1e-3,
        tokens_per_second=1234.0,
        consumed_samples=56,
    )
    with (
        caplog.at_level(logging.INFO),
        open_display(total=100, start=0, progress=True, console=Console(width=80)) as shown,
    ):
        shown.show_record(record)
        shown.show_record(ValidationRecord(step=10, loss=2.25))
    assert caplog.messages == [
        "step   7/100  loss 2.5000  1,234 tokens/s  grad norm -  loss scale 65536  lr 1.00e-03  SKIPPED: NaN or Inf in "
        "the gradients (2 so far)",
        "step  10/100  validation loss 2.2500",
    ]


def test_bar_on_a_terminal_shows_the_record(tmp_path):
    console = Console(force_terminal=True, width=160, record=True, file=(tmp_path / "out").open("w"))
    with open_display(total=10, start=0, progress=True, console=console) as shown:
        shown.advance_to(3)
        shown.show_record(
            TrainRecord(
                step=3,
                loss=2.5,
                skipped=False,
                skipped_steps=0,
                grad_norm=0.5,
                loss_scale=1.0,
                learning_rate=1e-3,
                tokens_per_second=1234.0,
                consumed_samples=56,
            )
        )
    text = console.export_text()
    assert "3/10" in text
    assert "loss 2.5000  1,234 tokens/s  grad norm 0.500  loss scale 1" in text


def closing(summary, width):
    """Return the closing tables as printed on a terminal of some width."""
    console = Console(width=width, record=True, file=io.StringIO())
    print_summary(summary, console)
    return console.export_text()


def test_closing_tables_show_the_result_and_the_entropy(run):
    text = closing(run[1], 100)
    for words in ("validation loss", "unigram entropy", "skipped steps", "master weights", "optimizer's own copies"):
        assert words in text


def test_closing_tables_cut_nothing_on_a_narrow_terminal(run):
    text = closing(run[1], 30)
    assert "…" not in text
    for words in ("training loss (nats/token)", "read from", "the optimizer's own copies"):
        assert words in text


def test_old_validation_loss_names_its_step(run):
    summary = run[1]
    assert summary.validation_step == 30
    assert "validation loss, step" not in closing(summary, 100)
    assert "validation loss, step 20" in closing(dataclasses.replace(summary, validation_step=20), 100)


@pytest.mark.parametrize(("mode", "named"), [("fp32", False), ("bf16", False), ("fp16", True)])
def test_slow_float16_is_a_note_of_fp16_runs_alone(mode, named, monkeypatch):
    monkeypatch.setattr(wide_gemm, "find_slow_dtypes", lambda: (torch.float16,))
    monkeypatch.setattr(cuda_shim, "has_cuda", lambda: False)
    with training_process(tiny(mode).model, seed=1) as process:
        assert any("no float16 matrix multiplication" in note for note in process.notes) is named


def test_a_run_leaves_no_threads_and_no_model_behind(tmp_path):
    from megatron.core.models.gpt import GPTModel

    def left():
        gc.collect()
        models = sum(type(one) is GPTModel for one in gc.get_objects())
        return len(list(Path("/proc/self/task").iterdir())), models

    pretrain(tiny(sharded=True, train={"train_iters": 1, "eval_iters": 0}), run_dir=tmp_path)
    before = left()
    pretrain(tiny(sharded=True, train={"train_iters": 1, "eval_iters": 0}), run_dir=tmp_path)
    assert left() == before
