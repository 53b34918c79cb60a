"""A run that Megatron Bridge saves and loads is the run that was saved, with its precision and with ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT.parent / "shared" / "published"
SOURCES = os.environ.get("PEER_SOURCES", "").split(os.pathsep)
"""Folder `src` of Megatron Bridge (2026-08-22), and the Megatron-LM that it pins; to read Wan it needs diffusers."""


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="needs the published recipes in ../shared/published")
@pytest.mark.skipif(len(SOURCES) != 2, reason="needs PEER_SOURCES=MEGATRON_BRIDGE/src:MEGATRON_LM, both of 2026-08-22")
def test_a_published_recipe_that_the_peer_saves_and_loads_starts_as_the_same_run() -> None:
    words = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("round_trip.py")), str(PUBLISHED), *SOURCES]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    *differences, counts = [line for line in done.stdout.splitlines() if "Megatron FSDP" not in line] or [done.stderr]
    assert (done.returncode, differences) == (0, []), counts
    found = json.loads(counts)
    assert (found["recipes"], found["equal"]) == (198, 4 * 198 - 10), "ten saved runs the peer does not read itself"
