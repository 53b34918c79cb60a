"""The real script, ``scripts/train.py``, run in a process and a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).resolve().parent
SCRIPT = HERE.parents[1] / "scripts" / "train.py"
OURS = ("HYDRA_FULL_ERROR", "BRIDGE_RECIPES", "RANK", "WORLD_SIZE")


@dataclass(frozen=True, kw_only=True)
class Done:
    """What came of a command."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture(scope="session")
def warm_run() -> Iterator[Run]:
    """Run the script's words in a fork of a process that has imported torch and Megatron already."""
    command = [sys.executable, "-W", "ignore", str(HERE / "warm_python.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:

        def run(*words: str, cwd: Path, script: str = str(SCRIPT), **environment: str) -> Done:
            inherited = {name: value for name, value in os.environ.items() if name not in OURS}
            logs = cwd.parent / f"{cwd.name}.logs"
            logs.mkdir(exist_ok=True)
            out, err = (logs / f"{len(list(logs.iterdir()))}.{name}" for name in ("out", "err"))
            request = {
                "words": [script, *words],
                "cwd": str(cwd),
                "env": {**inherited, **environment},
                "out": str(out),
                "err": str(err),
            }
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            code = int(server.stdout.readline())
            return Done(returncode=code, stdout=out.read_text(), stderr=err.read_text())

        yield run


@pytest.fixture
def train(warm_run: Run, tmp_path: Path) -> Run:
    """Run the script, or another one, in the test's folder; further keywords are environment variables."""

    def run(*words: str, **keywords: str) -> Done:
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
