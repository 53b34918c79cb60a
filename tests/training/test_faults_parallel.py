"""Faults on one of two ranks, and of a folder that both save to: both ranks end alike."""

from __future__ import annotations

import json
import os
import socket
import threading
from datetime import timedelta
from unittest.mock import Mock

import pytest

from bridge.runtime.megatron.peers import Peers
from tests import warm
from tests.training.loop_tiny import ROOT, in_two_processes, losses, records

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
    assert (runs / "checkpoints" / "iter_0000004.skipped").is_dir()
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
        ("stall", (0, 0), "did not end step 3 within 15 s: rank 1 (HOST)."),
        ("crash", (0, 1), None),
    ],
)
def test_a_rank_that_ends_or_stalls_ends_the_other_with_its_name(fault, codes, fact, tmp_path) -> None:
    timeout = {"train": {**SCHEDULE, "distributed_timeout_minutes": 0.25}}
    in_two_processes({"run": {**timeout, "by_rank": {"1": {"fault": [fault, 3]}}}}, tmp_path, codes=codes)
    errors = [json.loads(path.read_text()) for path in sorted((tmp_path / "run").glob("error-*.json"))]
    sentence = f"ranks: all 2 must take part in every step; {fact} Look at the log and the machine of each."
    if fault == "crash":
        sentence = "ranks: rank 1 (HOST) ended with ZeroDivisionError. Look at its log."
    assert errors[0]["text"] == sentence.replace("HOST", socket.gethostname())
    assert all(error["text"].startswith("ranks: ") and error["code"] == 1 for error in errors)
    assert len(errors) == (2 if fault == "stall" else 1)  # the stalled rank wakes up in the test, and ends too


ALONE = """
import sys
from pathlib import Path
from bridge.errors import TrainingError
from bridge.training.loop import pretrain
from tests.training.loop_tiny import tiny
try:
    pretrain(tiny(train={"distributed_timeout_minutes": 0.02}), run_dir=Path(sys.argv[1]))
except TrainingError as error:
    print(error)
"""


@pytest.mark.parametrize("stalls", [False, True], ids=["refused", "stalled"])
def test_a_rank_without_a_launcher_whose_first_rank_does_not_answer_ends_with_one_sentence(stalls, tmp_path) -> None:
    with socket.socket() as first:
        first.bind(("localhost", 0))
        if stalls:
            first.listen()
        port = first.getsockname()[1]
        ranks = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        done = warm.run(["python", "-c", ALONE, tmp_path], cwd=ROOT, env={**os.environ, **ranks})
    assert done.stdout.splitlines()[-1] == (
        f"ranks: all 2 must meet at localhost:{port} within 1.2 s, and did not (train.distributed_timeout_minutes). "
        "One of them stalls, or was refused: look at the log of each."
    )


def test_a_store_that_no_longer_answers_is_not_waited_for(monkeypatch) -> None:
    monkeypatch.setattr("bridge.runtime.megatron.peers.STORE_SECONDS", 0.1)
    stalled, ends = threading.Event(), threading.Event()
    store = Mock()
    store.set = store.check = lambda *_: ends.wait(60 if stalled.is_set() else 0)
    store.clone.return_value = store
    peers = Peers(store, rank=1, ranks=2, timeout=timedelta(minutes=1))
    with peers.answer_alarms():
        stalled.set()
        assert "the store of the launch must answer every rank, and no longer does" in str(peers.diagnose_failure())
    ends.set()
