"""The command as it is run: a real process, and a signal."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "train.py"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step_with_everything_written_and_exit_code_130(
    number: int, tmp_path: Path
) -> None:
    words = ["model=gpt_tiny", "train=smoke", "train.train_iters=100000", "train.eval_interval=0"]
    words += [f"checkpoint.save={tmp_path / 'saved'}", f"hydra.run.dir={tmp_path / 'run'}"]
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "step" in line and "tokens/s" in line:
                process.send_signal(number)
                break
        output = process.stdout.read()
    assert process.returncode == 130, output
    assert "Stopped on request after step" in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped_early"]
    assert (tmp_path / "run" / "loss.png").is_file()
    saved = (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text()
    assert int(saved) == summary["iteration"]


def test_an_fp8_recipe_stops_before_anything_is_built_where_nothing_runs_fp8(tmp_path: Path) -> None:
    words = ["model=gpt_tiny", "train=smoke", "mixed_precision=fp8_delayed", f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "model.fp8: FP8 matrix multiplications need Transformer Engine on a CUDA device, got 'hybrid' and there is no "
        "CUDA device. Choose a recipe without FP8 (bf16_mixed, say), or run this one where Transformer Engine works."
    )
