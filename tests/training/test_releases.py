"""A checkpoint of one release of Megatron Core continues in a newer one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import releases
from tests.training.loop_tiny import records

BEGIN = """
import sys
from pathlib import Path
from bridge.training.loop import pretrain
from tests.training.loop_tiny import tiny
folder = Path(sys.argv[1])
for name, steps, files in (("whole", 4, {}), ("older", 2, {"save": str(folder / "saved")})):
    train = {"train_iters": steps, "lr_decay_iters": 4, "eval_iters": 0}
    pretrain(tiny(low="mxfp8", sharded=True, train=train, **files), run_dir=folder / name)
"""
RESUME = """
import sys
from pathlib import Path
from bridge.training.loop import pretrain
from tests.training.loop_tiny import tiny
folder = Path(sys.argv[1])
train = {"train_iters": 4, "lr_decay_iters": 4, "eval_iters": 0}
pretrain(tiny(low="mxfp8", sharded=True, train=train, load=str(folder / "saved")), run_dir=folder / "newer")
"""
UNPACKED = [str(releases.NEXT)]
"""Folders of the newer release that `make setup` unpacks."""


def run_on(first: list[str], code: str, folder: Path) -> None:
    """Run code in a process that searches some folders before the environment."""
    asked = releases.first_folders()
    inherited = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place not in asked]
    path = os.pathsep.join([*first, str(releases.ROOT), *inherited])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(folder)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not releases.is_there(), reason=releases.ABSENT)
@pytest.mark.parametrize("older", [[], UNPACKED], ids=["installed", "next"])
def test_a_run_of_an_older_release_continues_on_the_newer_one(older: list[str], tmp_path: Path):
    newer = releases.first_folders() or UNPACKED
    if older == newer:
        pytest.skip(releases.FROM_ONE_TO_THE_OTHER)
    run_on(older, BEGIN, tmp_path)
    run_on(newer, RESUME, tmp_path)
    facts = json.loads((tmp_path / "newer" / "summary.json").read_text())
    assert facts["steps"] == 2
    whole, newer_steps = records(tmp_path / "whole"), records(tmp_path / "newer")
    assert [one["step"] for one in newer_steps] == [3, 4]
    assert [one["loss"] for one in newer_steps] == pytest.approx([one["loss"] for one in whole[2:]], rel=1e-3)
