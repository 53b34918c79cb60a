"""Faults on one of two ranks, and of a folder that both save to: both ranks end alike."""

from __future__ import annotations

import json
import os
import socket

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
            "poisoned": {"mode": "bf16", "train": SCHEDULE, "by_rank": {"1": {"fault": ["poison", 2]}}},
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


@pytest.mark.parametrize(
    ("fault", "codes", "fact"),
    [
        ("die", (0, -9), "no longer answer after step 2: rank 1 (HOST)."),
        ("stall", (0, 0), "did not end step 3 within 3 s: rank 1 (HOST)."),
        ("crash", (0, 1), None),
    ],
)
def test_a_rank_that_ends_or_stalls_ends_the_other_with_its_name(fault, codes, fact, tmp_path) -> None:
    timeout = {"train": {**SCHEDULE, "distributed_timeout_minutes": 0.05}}
    in_two_processes({"run": {**timeout, "by_rank": {"1": {"fault": [fault, 3]}}}}, tmp_path, codes=codes)
    errors = [json.loads(path.read_text()) for path in sorted((tmp_path / "run").glob("error-*.json"))]
    sentence = f"ranks: all 2 must take part in every step; {fact} Look at the log and the machine of each."
    if fault == "crash":
        sentence = "ranks: rank 1 (HOST) ended with ZeroDivisionError. Look at its log."
    assert errors[0]["text"] == sentence.replace("HOST", socket.gethostname())
    assert all(error["text"].startswith("ranks: ") and error["code"] == 1 for error in errors)
    assert len(errors) == (2 if fault == "stall" else 1)  # the stalled rank wakes up in the test, and ends too
    assert errors[0]["seconds"] < 20
