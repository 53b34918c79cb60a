"""Every precision saved, resumed in every other: it runs, is asked for first, or is refused before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.errors import CheckpointError
from bridge.training.config import runtime_config_update
from bridge.training.loop import pretrain
from tests.training.loop_tiny import ROOT, records, tiny

NAMES = ("fp32", "bf16_mixed", "fp16_mixed", "fp8_current", "fp8_delayed", "blockwise", "mxfp8", "nvfp4")
SCHEDULE = {"lr_decay_iters": 4, "eval_iters": 0}
RUNS, ASKED, REFUSED = "runs", "asked", "-"


def config(name: str, steps: int, *, sharded: bool = True, **checkpoint):
    """Return a run of four layers: recipes that keep the first and the last one in BF16 store two."""
    made = tiny(sharded=sharded, model={"num_layers": 4}, train={**SCHEDULE, "train_iters": steps}, **checkpoint)
    made.mixed_precision = name
    return made


def train(made, folder: Path) -> None:
    runtime_config_update(made)
    pretrain(made, run_dir=folder)


def resumed(saved: Path, name: str, folder: Path) -> str:
    """Return how a checkpoint is resumed in a precision, and hold that the run went on to its last step."""
    for outcome in (RUNS, ASKED):
        made = config(name, 4, load=str(saved))
        made.resume.allow_precision_change = outcome is ASKED
        try:
            train(made, folder)
        except CheckpointError as error:
            asks = "Set resume.allow_precision_change=true" in str(error)
            assert "was saved in another precision" in str(error)
            assert not list(folder.glob("metrics.jsonl")) or not records(folder)
            if outcome is RUNS and asks:
                continue
            assert not asks
            return REFUSED
        assert [step["step"] for step in records(folder)] == [3, 4]
        return outcome
    raise AssertionError


@pytest.mark.parametrize(("saved", "name"), [("nvfp4", "bf16_mixed"), ("fp8_current", "blockwise")])
def test_stored_weights_are_resumed_by_a_run_that_does_not_store_them(saved, name, tmp_path):
    train(config(saved, 2, save=str(tmp_path / "saved")), tmp_path / "first")
    assert resumed(tmp_path / "saved", name, tmp_path / "second") == RUNS


def test_a_resumed_run_in_bf16_says_nothing_of_scales(tmp_path, caplog):
    train(config("fp8_current", 2, save=str(tmp_path / "saved")), tmp_path / "first")
    caplog.clear()
    assert resumed(tmp_path / "saved", "bf16_mixed", tmp_path / "second") == RUNS
    assert "scales begin" not in caplog.text
    assert "amax histories begin" not in caplog.text


@pytest.mark.slow
def test_each_pair_is_resumed_as_the_table_of_the_docs_says(tmp_path):
    rows = ["| saved \\ resumed | " + " | ".join(NAMES) + " |", "|---" * (len(NAMES) + 1) + "|"]
    for saved in NAMES:
        folder = tmp_path / saved
        train(config(saved, 2, save=str(folder / "saved")), folder / "first")
        cells = [resumed(folder / "saved", name, folder / name) for name in NAMES]
        rows.append(f"| {saved} | " + " | ".join(cells) + " |")
    assert "\n".join(rows) in (ROOT / "docs/howto/train.md").read_text()
