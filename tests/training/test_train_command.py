"""The command as it is run: a real process, and a signal."""

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from bridge.cli.main import main
from bridge.report.answer import Answer
from bridge.report.html.content import collect_run_content
from bridge.report.table import render_plain_text
from bridge.report.watch import make_watch_view
from bridge.runtime.audit.run_folder import RunFolder
from bridge.runtime.checkpoint.folder import read_latest_iteration
from bridge.runtime.checkpoint.lock import lock_folder
from tests import warm
from tests.training.grid import slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "train.py"


@contextmanager
def endless_run(tmp_path: Path, *launcher: str) -> Iterator[subprocess.Popen[str]]:
    words = ["model=gpt_tiny", "train=smoke", "train.train_iters=100000", "train.eval_interval=0"]
    words += [f"checkpoint.save={tmp_path / 'saved'}", f"hydra.run.dir={tmp_path / 'run'}"]
    command = [sys.executable, *launcher, str(SCRIPT), *words]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    # A command that a shell starts in the background ignores Ctrl-C, and the tests may be one.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    own = {"preexec_fn": heard, "process_group": 0}
    with subprocess.Popen(command, **output, text=True, cwd=tmp_path, **own) as process:
        yield process


@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGINT)])
def test_a_signal_ends_the_run_after_its_step_with_everything_written(number: int, tmp_path: Path) -> None:
    with endless_run(tmp_path) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "step" in line and "tokens/s" in line:
                process.send_signal(number)
                break
        output = process.stdout.read()
    assert process.returncode == 128 + number, output
    assert "Stopped on request after step" in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stop_signal"] == number
    run = RunFolder.from_path(tmp_path / "run")
    stopped = f"stopped by {signal.Signals(number).name} after step {summary['iteration']} of 100000"
    assert collect_run_content(run).verdict[0] == Answer(state="unknown", sentence=f"The run was {stopped}.")
    assert stopped in render_plain_text(make_watch_view(run))
    assert (tmp_path / "run" / "loss.png").is_file()
    saved = (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text()
    assert int(saved) == summary["iteration"]


@pytest.mark.slow
def test_a_signal_to_a_whole_job_which_torchrun_forwards_to_its_workers_keeps_the_checkpoint(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    with endless_run(tmp_path, *launcher) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if "step" in line and "tokens/s" in line)
        os.killpg(process.pid, signal.SIGTERM)
        output = process.stdout.read()
    assert "Stopped on request after step" in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert read_latest_iteration(tmp_path / "saved") == summary["iteration"]


@pytest.mark.parametrize("number", [signal.SIGINT, slow(signal.SIGTERM)])
def test_a_signal_before_the_first_step_ends_the_command_in_one_sentence(number: int, tmp_path: Path) -> None:
    with endless_run(tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()  # logged before the model is built
        process.send_signal(number)
        output = process.stdout.read()
    assert process.returncode == 128 + number, output
    assert output.endswith("Stopped on request.\n")
    assert "Traceback" not in output


def train(tmp_path: Path, *words: str) -> warm.Done:
    tiny = ["model=gpt_tiny", "train=smoke", "train.train_iters=2", f"hydra.run.dir={tmp_path / 'run'}"]
    return warm.run(["python", SCRIPT, *tiny, *words], cwd=tmp_path)


def test_an_fp8_recipe_trains_on_the_same_command_and_says_once_that_it_is_emulated(tmp_path: Path) -> None:
    done = train(tmp_path, "mixed_precision=fp8_delayed")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("FP8/FP4 matmuls: emulated (delayed, hybrid)") == 1
    assert "Matmuls of the first step: layers 1-3: delayed, fprop e4m3 x e4m3, dgrad e5m2 x e4m3" in done.stdout


def test_an_fp8_run_without_a_matmul_in_fp8_is_no_good_run_in_any_answer(tmp_path: Path) -> None:
    rows = "mixed_precision.modules=[{select: '*', precision: bf16}]"
    done = train(tmp_path, "mixed_precision=fp8_current", rows, "silence.PB297=of a test")
    assert done.returncode != 0
    assert "ran no matmul in low precision" in done.stderr
    run = RunFolder.from_path(tmp_path / "run")
    assert [one.state for one in collect_run_content(run).verdict][:2] == ["unknown", "bad"]
    assert main(["audit", str(run.path)]) == 1


def test_a_typed_value_that_equals_megatrons_default_is_not_replaced_in_silence(tmp_path: Path) -> None:
    done = train(tmp_path, "mixed_precision=bf16_mixed", "model.bf16=false")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("PB123 model.bf16: the recipe states True and wins over the owner's own value") == 1


def test_a_schedule_on_the_command_line_is_run_recorded_and_run_again_from_its_record(tmp_path: Path) -> None:
    words = ["mixed_precision=nvfp4", "mixed_precision.fp4_param_gather=false", "train.train_iters=4"]
    done = train(tmp_path, *words, "precision_schedule=[{until: 0.5}, {recipe: bf16_mixed}]")
    assert done.returncode == 0, done.stderr
    assert "Matmuls from step 3, bf16_mixed: layers 1-3, output: bf16." in done.stdout
    assert "Plan = record" in collect_run_content(RunFolder.from_path(tmp_path / "run")).verdict[1].sentence
    recorded = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert recorded["precision_schedule"] == [{"until": 0.5}, {"recipe": "bf16_mixed"}]
    checked = warm.run(["precision-bridge", "check", "--config", tmp_path / "run" / "config.yaml"], cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("held", ["run", "saved"])
def test_a_second_run_in_the_folder_of_another_leaves_nothing_behind(held: str, tmp_path: Path) -> None:
    with lock_folder(tmp_path / held):
        done = train(tmp_path, f"checkpoint.save={tmp_path / 'saved'}")
    assert done.returncode == 2
    assert "one run may write into a folder" in done.stderr
    assert not any((tmp_path / "run").glob("*"))


def test_a_schedule_that_needs_other_weights_leaves_nothing_behind(tmp_path: Path) -> None:
    done = train(tmp_path, "mixed_precision=nvfp4", "precision_schedule=[{until: 0.5}, {recipe: bf16_mixed}]")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "mixed_precision.fp4_param_gather: stores the weights in FP4" in done.stderr
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_asking_for_transformer_engine_where_it_cannot_run_is_one_sentence(tmp_path: Path) -> None:
    done = train(tmp_path, "mixed_precision=fp8_delayed", "precision_backend=te")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "  PB612 target.gpu: precision_backend=te needs a CUDA device and transformer_engine, which the machine does "
        "not have, got 'no GPU'. Use a machine that has it; or use precision_backend=auto, emulated or te_cpu."
    )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
