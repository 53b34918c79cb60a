"""Faults on one of two ranks, and of a folder that both save to: both ranks end alike."""

from __future__ import annotations

import json
import os

import pytest

from tests.training.loop_tiny import in_two_processes, losses, records

SCHEDULE = {"train_iters": 4, "lr_decay_iters": 4, "eval_iters": 0}
SAVING = {"mode": "bf16", "train": SCHEDULE, "save": "checkpoints", "save_interval": 2, "sharded": True}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    """Folder of a run, of one that resumes from its damaged checkpoints, and of runs with a fault."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "file").write_text("")
    in_two_processes({"whole": SAVING}, folder)
    damaged = max((folder / "checkpoints" / "iter_0000004").glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(damaged, damaged.stat().st_size - 1)
    return in_two_processes(
        {
            "resumed": {**SAVING, "load": "checkpoints"},
            "blocked": {"mode": "bf16", "save": "file/checkpoints", "by_rank": {}},
            "taken": {"mode": "bf16", "save": "checkpoints", "by_rank": {}},
            "poisoned": {"mode": "bf16", "train": SCHEDULE, "by_rank": {"1": {"poison": 2}}},
        },
        folder,
    )


def test_a_nan_on_one_rank_skips_the_step_on_all(runs) -> None:
    assert [step["skipped"] for step in records(runs / "poisoned")] == [False, True, False, False]
    assert not list((runs / "poisoned").glob("error-*"))


def test_all_ranks_resume_from_the_checkpoint_before_a_damaged_one(runs) -> None:
    assert losses(runs / "resumed") == losses(runs / "whole")[2:]
    assert (runs / "checkpoints" / "iter_0000004.damaged").is_dir()
    assert (runs / "checkpoints" / "iter_0000004" / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("blocked", "checkpoint.save: must be a folder that can be written to, got "),
        ("taken", "checkpoint.save: the folder holds a checkpoint of step 4, and this run begins at step 0, got "),
    ],
)
def test_a_folder_that_cannot_be_saved_to_ends_all_ranks_with_one_sentence(name, sentence, runs) -> None:
    first, second = (json.loads((runs / name / f"error-{rank}.json").read_text()) for rank in (0, 1))
    assert first["text"] == second["text"]
    assert first["text"].startswith(sentence)
