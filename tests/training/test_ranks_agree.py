"""Ranks with different settings: all of them end, with the setting and both values, before a model is built."""

from __future__ import annotations

import json
import socket

import pytest

from tests import warm
from tests.training.loop_tiny import ROOT, in_two_processes, losses

PLANS = {
    "learning rate": {"optimizer": {"lr": 1e-3}},
    "recipe": {"low": "mxfp8"},
    "mode": {"mode": "fp32"},
    "steps": {"train": {"train_iters": 7}},
    "layout": {"model": {"tensor_model_parallel_size": 2}},
    "variable": {"environment": {"NVTE_FLASH_ATTN": "0"}},
    "package": {"path": ["PLACE"]},
    "machine": {"data": {"num_workers": 1}},
}
FOUND = {
    "learning rate": {"optimizer.lr": ("0.001", "0.002")},
    "recipe": {"model.fp8_recipe": ("mxfp8", "tensorwise")},
    "mode": {"model.bf16": ("False", "True"), "model.params_dtype": ("torch.float32", "torch.bfloat16")},
    "steps": {"train.train_iters": ("7", "6")},
    "layout": {"model.tensor_model_parallel_size": ("2", "1")},
    "variable": {"environment NVTE_FLASH_ATTN": ("0", "unset")},
    "package": {"package megatron-core": ("9.9.9", None)},
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory):
    """Folder of the runs in two processes, of which rank 1 has other settings."""
    folder = tmp_path_factory.mktemp("ranks")
    other = folder / "packages" / "megatron_core-9.9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 9.9.9\n")
    text = json.dumps(PLANS).replace("PLACE", str(folder / "packages"))
    plans = {
        name: {"mode": "bf16", **({"low": "tensorwise"} if name == "recipe" else {}), "by_rank": {"1": change}}
        for name, change in json.loads(text).items()
    }
    return in_two_processes(plans, folder)


@pytest.mark.parametrize("name", FOUND)
def test_a_setting_that_differs_ends_every_rank_with_both_values(name, ended) -> None:
    first, second = (json.loads((ended / name / f"error-{rank}.json").read_text()) for rank in (0, 1))
    assert first["text"] == second["text"]
    assert first["code"] == second["code"] == 2
    headline, *lines = first["text"].splitlines()
    assert headline == (
        "The settings of a run must be the same on every rank, and rank 1 differs from rank 0. Start every rank with "
        "the same command, environment and packages."
    )
    host = socket.gethostname()
    for path, values in FOUND[name].items():
        (line,) = (line for line in lines if line.startswith(f"  {path}: "))
        if values is not None:
            other, own = values
            assert line.startswith(f"  {path}: {other} on rank 1 ({host}), {own or ''}")
            assert line.endswith(f" on rank 0 ({host})")


def test_only_the_settings_that_differ_are_named(ended) -> None:
    text = json.loads((ended / "learning rate" / "error-0.json").read_text())["text"]
    assert [line.partition(":")[0].strip() for line in text.splitlines()[1:]] == ["optimizer.lr"]


def test_settings_of_one_machine_may_differ(ended) -> None:
    assert len(losses(ended / "machine")) == 6
    assert not list((ended / "machine").glob("error-*.json"))


SIXTEEN = """
import os
import torch
from bridge.errors import RunConfigError
from bridge.runtime.megatron.agreement import require_agreement
from bridge.training.fingerprint import compute_fingerprint
from tests.training.loop_tiny import tiny

torch.distributed.init_process_group("gloo")
settings = compute_fingerprint(tiny(), os.environ)
require_agreement(settings)
if os.environ["RANK"] == "11":
    settings["optimizer.lr"] = "7"
try:
    require_agreement(settings)
except RunConfigError as error:
    print(error)
torch.distributed.barrier()
"""


@pytest.mark.slow
def test_sixteen_ranks_agree_and_disagree_with_one_sentence() -> None:
    ranks = warm.launch(["python", "-c", SIXTEEN], processes=16, cwd=ROOT)
    (text,) = {done.stdout for done in ranks}
    assert f"  optimizer.lr: 7 on rank 11 ({socket.gethostname()}), 0.002 on rank 0" in text
