"""The hook of pre-commit, as pre-commit itself runs it from this repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHOWCASE = ROOT / "docs" / "showcase" / "llama3_70b.yaml"
WRONG = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 4 "
    "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --bf16 --tensor-model-parallel-size 3\n"
)


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the repository of this project")
def test_the_hook_fails_for_a_run_with_an_error_and_passes_over_other_files(tmp_path: Path) -> None:
    hooks, project = tmp_path / "hooks", tmp_path / "project"
    for folder in (hooks, project):
        folder.mkdir()
        git(folder, "init", "-q")
    shutil.copy(ROOT / ".pre-commit-hooks.yaml", hooks)
    shutil.copy(SHOWCASE, project / "run.yaml")
    (project / "ci.yaml").write_text("on: push\njobs: {build: 1}\n")
    (project / "setup.py").write_text("import setuptools\n")
    git(hooks, "add", "-A")
    git(hooks, "commit", "-qm", "hooks")
    git(project, "add", "-A")

    def run_hook() -> subprocess.CompletedProcess[str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PRE_COMMIT_HOME": str(tmp_path / "home")}
        words = [sys.executable, "-m", "pre_commit", "try-repo", str(hooks), "precision-bridge-check", "--all-files"]
        return subprocess.run(
            [*words, "--verbose"], cwd=project, env=environment, capture_output=True, text=True, check=False
        )

    passed = run_hook()
    assert passed.returncode == 0, passed.stdout
    assert "run.yaml: bf16 with tensorwise scaling; nothing found\n" in passed.stdout
    assert "not read, no sections of a run: 1 file (ci.yaml)\n" in passed.stdout
    (project / "wrong.sh").write_text(WRONG)
    git(project, "add", "-A")
    failed = run_hook()
    assert failed.returncode == 1, failed.stdout
    assert "wrong.sh: bf16; 1 error (PB408)\n" in failed.stdout
    assert "setup.py" not in failed.stdout
