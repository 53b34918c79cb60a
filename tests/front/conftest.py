"""The real script, ``scripts/train.py``, run in a folder of its own by a fork of the warm process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import warm

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train.py"
OURS = ("HYDRA_FULL_ERROR", "BRIDGE_RECIPES", "RANK", "WORLD_SIZE", "NVTE_")  # other tests of a worker leave some


Run = Callable[..., warm.Done]


@pytest.fixture(scope="session")
def warm_run() -> Run:
    """Run the script's words in a folder; further keywords are environment variables."""

    def run(*words: str, cwd: Path, script: str = str(SCRIPT), **environment: str) -> warm.Done:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        return warm.run(["python", script, *words], cwd=cwd, env={**inherited, **environment})

    return run


@pytest.fixture
def train(warm_run: Run, tmp_path: Path) -> Run:
    """Run the script, or another one, in the test's folder; further keywords are environment variables."""

    def run(*words: str, **keywords: str) -> warm.Done:
        return warm_run(*words, cwd=tmp_path, **keywords)

    return run


@pytest.fixture
def shown(train: Run) -> Callable[..., Any]:
    """Run the script with --cfg job and return the config it shows."""

    def run(*words: str, **environment: str) -> Any:
        done = train("--cfg", "job", *words, **environment)
        assert (done.returncode, done.stderr) == (0, "")
        return yaml.safe_load(done.stdout)

    return run


@pytest.fixture
def refused(train: Run, tmp_path: Path) -> Callable[..., str]:
    """Run the script, which must refuse in one message and make no folder, and return the message."""

    def run(*words: str, **environment: str) -> str:
        done = train(*words, **environment)
        assert (done.returncode, done.stdout) == (2, "")
        assert "Traceback" not in done.stderr
        assert "use +" not in done.stderr
        assert not (tmp_path / "outputs").exists()
        return done.stderr.rstrip("\n")

    return run
