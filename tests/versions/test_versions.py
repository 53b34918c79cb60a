"""What a release promises: names, rules, keys of JSON, run folders and checkpoints of 0.1.0 go on."""

from __future__ import annotations

import json
import re
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

import bridge
import bridge.training.mixed_precision as compatible
from bridge.rules.rulebook import RULES
from tests import warm
from tests.training.loop_tiny import losses

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
BEFORE = json.loads((HERE / "0.1.0.json").read_text())
"""Ids of rules, public names and keys of `plan --json` of 0.1.0."""
RUN = (
    *("model=gpt_tiny", "train=smoke", "model.num_layers=1", "model.hidden_size=16", "model.ffn_hidden_size=32"),
    *("model.num_attention_heads=2", "model.seq_length=32", "mixed_precision=fp8_delayed"),
    *("mixed_precision.first_last_layers_bf16=false", "train.train_iters=4", "train.lr_warmup_iters=0"),
    *("train.eval_iters=0", "logging.log_interval=1", "logging.tensorboard=false", "logging.progress=false"),
)
"""The command line that wrote `0.1.0.tar.xz`: a run of four steps, and its checkpoint of step 2."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with the run folder `run` and the folder `checkpoints` that 0.1.0 wrote."""
    with tarfile.open(HERE / "0.1.0.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def answer(*words: str, folder: Path) -> str:
    done = warm.run([warm.COMMAND, *words], cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_no_rule_and_no_public_name_is_gone() -> None:
    of_older_te = {"PB322", "PB325", "PB349", "PB425", "PB462"}
    of_settings_without_a_reader = {"PB463", "PB504", "PB541", "PB543"}
    without_a_case = {"PB221"}  # Megatron Core reduces amaxes over no stages, and runs every expert on its rank
    gone = of_older_te | of_settings_without_a_reader | without_a_case
    assert set(BEFORE["rules"]) - {rule.id for rule in RULES} == gone
    assert set(BEFORE["names"]) <= set(bridge.__all__)
    assert set(BEFORE["compatible"]) <= set(compatible.__all__)


def test_a_run_folder_of_the_version_before_is_read(folder: Path) -> None:
    plan = json.loads(answer("plan", "--config", "run", "--json", folder=folder))
    assert set(BEFORE["plan"]["top"]) <= set(plan)
    assert set(BEFORE["plan"]["group"]) <= set(plan["groups"][0])
    assert plan["precision"] == "bf16_with_fp8_delayed_scaling_mixed, first_last_layers_bf16=False"
    assert answer("audit", "run", folder=folder).endswith("Plan = record.\n")
    assert "command line" in answer("explain", "mixed_precision.first_last_layers_bf16", "--run", "run", folder=folder)
    answer("check", "--config", "run", folder=folder)
    answer("report", "run", "--format", "md", folder=folder)
    answer("checkpoint", "verify", "checkpoints", folder=folder)


def test_a_recipe_whose_values_have_changed_since_a_run_is_shown_with_the_difference(folder: Path) -> None:
    config = folder / "run" / "config.yaml"
    config.write_text(config.read_text().replace("fp8_amax_history_len: 1024", "fp8_amax_history_len: 512"))
    plan = json.loads(answer("plan", "--config", "run", "--json", folder=folder))
    assert "fp8_amax_history_len=512" in plan["precision"]


def test_a_checkpoint_of_the_version_before_is_resumed_and_goes_on(folder: Path) -> None:
    before = losses(folder / "run")
    words = [*RUN, "checkpoint.load=checkpoints", "checkpoint.save=checkpoints", "logging.run_dir=run"]
    assert "Resumed from step 2 of checkpoints." in answer("train", *words, folder=folder)
    assert losses(folder / "run") == pytest.approx(before, rel=0.01)  # Python's own text differs between versions
    assert "iter_0000004" in answer("checkpoint", "inspect", "checkpoints", folder=folder)


def test_the_citation_is_of_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version


def test_the_workflow_calls_targets_of_the_makefile() -> None:
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"].values()
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12"]
    called = [step["run"] for step in job["steps"] if "run" in step]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert called == [f"make {name}" for name in ("lint", "test", "release")]
    assert {word.removeprefix("make ") for word in called} <= set(targets)
