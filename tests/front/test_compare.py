"""The comparison command on real runs: twins, verdicts, files, and finished runs that are not run again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.front.conftest import SCRIPT

COMPARE = str(SCRIPT.with_name("compare.py"))
TINY = ("model=gpt_tiny", "model.num_layers=2", "train=smoke", "train.train_iters=40", "train.eval_iters=1")
QUIET = ("logging.tensorboard=false", "logging.log_interval=1", "train.global_batch_size=4", "train.audit=warn")


@pytest.fixture(scope="module")
def comparison(warm_run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a comparison of BF16 with itself under another name, and with a recipe that is broken on purpose."""
    cwd: Path = tmp_path_factory.mktemp("comparison")
    group = cwd / "team" / "mixed_precision"
    group.mkdir(parents=True)
    (group / "broken.yaml").write_text("defaults: [fp8_delayed, _self_]\nfp8_margin: 24\n")
    (group / "same.yaml").write_text("defaults: [bf16_mixed, _self_]\nbf16: true\n")
    words = ("mixed_precision=bf16_mixed,broken,same", "seeds=2", "--config-dir", "team", *TINY, *QUIET)
    done = warm_run(*words, cwd=cwd, script=COMPARE)
    assert done.returncode == 1, done.stderr
    (cwd / "stdout").write_text(done.stdout)
    again = warm_run(*words, cwd=cwd, script=COMPARE)
    assert again.returncode == 1
    assert "step " not in again.stdout.partition("Compared with")[0]
    assert done.stdout.partition("Compared with")[2] == again.stdout.partition("Compared with")[2]
    return cwd


def test_twins_are_proven_and_each_recipe_gets_a_verdict(comparison: Path) -> None:
    (found,) = json.loads((comparison / "outputs/comparison/comparison.json").read_text())
    baseline, broken, same = found["rows"]
    assert found["equal_fields"] > 200
    assert (baseline["recipe"], baseline["gap"]) == ("bf16_mixed", None)
    assert broken["gap"]["verdict"] == "outside"
    assert broken["gap"]["seeds"] == 2
    assert broken["gap"]["low"] > 0.01
    assert "model.fp8_margin" in broken["differs_in"]
    assert (same["gap"]["verdict"], same["gap"]["bit_equal"]) == ("within", True)
    assert baseline["step_seconds"] > 0
    assert baseline["peak_memory_bytes"] > 2**26
    assert set(broken["sqnr_db"]) == {"input", "weight", "grad_output"}
    shown = (comparison / "stdout").read_text()
    assert "same: within 1 %. Every loss is the baseline's, bit for bit." in shown
    assert "broken: outside 1 %. The whole interval is above the gate." in shown
    assert (comparison / "outputs/comparison/comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "## Compared with bf16_mixed" in (comparison / "outputs/comparison/comparison.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("model", [["model=hybrid_tiny"], ["model=gpt_tiny", "model.num_moe_experts=4"]])
def test_a_hybrid_and_a_model_with_experts_are_compared(train, tmp_path: Path, model: list[str]) -> None:
    words = ["mixed_precision=bf16_mixed,fp8_current", "seeds=1", *model, "train=smoke", "train.train_iters=8", *QUIET]
    done = train(*words, script=COMPARE)
    (found,) = json.loads((tmp_path / "outputs/comparison/comparison.json").read_text())
    baseline, low = found["rows"]
    assert (baseline["recipe"], low["gap"]["verdict"]) == ("bf16_mixed", "cannot tell"), done.stdout
    assert "model.fp8" in low["differs_in"]
    assert low["sqnr_db"]["weight"] > 20


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["mixed_precision=bf16_mixed"], "mixed_precision: a comparison needs two recipes or more. Write "),
        (["mixed_precision=fp32,bf16", "seeds=0"], "seeds: must be a number from 1 to 999, got '0'. Write seeds=3."),
        (["mixed_precision=fp32,bf16", "gate=1"], "gate: must be a share of the baseline's loss, got '1'. Write "),
    ],
)
def test_a_comparison_that_cannot_be_is_refused(train, tmp_path: Path, words: list[str], error: str) -> None:
    done = train(*words, script=COMPARE)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(error)
    assert list(tmp_path.iterdir()) == []
    assert train("--help", script=COMPARE).stdout.startswith("The comparison command: ")


def test_runs_that_are_too_short_to_tell_are_refused_before_the_first_one(train, tmp_path: Path) -> None:
    words = ["mixed_precision=bf16_mixed,fp8_current", "seeds=1", *TINY, *QUIET]
    done = train(*words, "train.train_iters=6", script=COMPARE)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "train.train_iters: a comparison could not tell anything: 6 steps with a warm-up of 2 and a record every 1 are "
        "too few. 8 steps would do.\n"
    )
    assert list(tmp_path.iterdir()) == []
    done = train(*words, "train.train_iters=5,6", script=COMPARE)
    assert done.returncode == 2
    assert "5 steps with a warm-up of 2" in done.stderr
    assert not list(tmp_path.rglob("metrics.jsonl"))


@pytest.mark.slow
def test_the_comparison_of_the_readme_gives_a_verdict(train) -> None:
    readme = (SCRIPT.parents[1] / "README.md").read_text()
    (words,) = re.findall(r"`precision-bridge compare (mixed_precision=.*)`", readme)
    done = train(*words.split(), script=COMPARE)
    assert done.returncode == 0
    assert "bf16_with_fp8_current_scaling_mixed: within 1 %. The whole interval is inside the gate." in done.stdout
    assert done.cpu_seconds < 120
