"""A checkpoint of one release of Megatron Core continues in a newer one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.training.loop import pretrain
from tests import releases
from tests.training.loop_tiny import records, tiny

RESUME = """
import sys
from pathlib import Path
from bridge.training.loop import pretrain
from tests.training.loop_tiny import tiny
folder = Path(sys.argv[1])
train = {"train_iters": 4, "lr_decay_iters": 4, "eval_iters": 0}
pretrain(tiny(low="mxfp8", sharded=True, train=train, load=str(folder / "saved")), run_dir=folder / "newer")
"""


@pytest.mark.skipif(not releases.is_there(), reason=releases.ABSENT)
@pytest.mark.skipif(releases.is_next(), reason=releases.FROM_ONE_TO_THE_OTHER)
def test_a_run_of_the_installed_release_continues_on_the_newer_one(tmp_path: Path):
    schedule = {"lr_decay_iters": 4, "eval_iters": 0}
    for folder, steps, files in (("whole", 4, {}), ("older", 2, {"save": str(tmp_path / "saved")})):
        config = tiny(low="mxfp8", sharded=True, train={**schedule, "train_iters": steps}, **files)
        pretrain(config, run_dir=tmp_path / folder)
    path = os.pathsep.join([str(releases.NEXT), str(releases.ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RESUME, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "newer" / "summary.json").read_text())
    assert facts["steps"] == 2
    whole, newer = records(tmp_path / "whole"), records(tmp_path / "newer")
    assert [one["step"] for one in newer] == [3, 4]
    assert [one["loss"] for one in newer] == pytest.approx([one["loss"] for one in whole[2:]], rel=1e-3)
