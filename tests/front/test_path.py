"""The path of a run: from the command line to the assignment of `model.bf16`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).with_name("path_of_a_run.py")
ROOMS = ("front", "registry", "read", "preflight", "sync")
"""The rooms that a run goes through, each entered for the first time after the one before."""


@pytest.fixture(scope="module")
def path(warm_run: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("path")
    done = warm_run("mixed_precision=bf16_mixed", cwd=folder, script=str(TOOL))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_precision_travels_through_at_most_23_files(path: dict[str, Any]) -> None:
    assert len(path["travelled"]) <= 23, "\n".join(path["travelled"])
    assert "sync/synchroniser.py" in path["travelled"]


def test_functions_of_at_most_50_files_run_on_the_way(path: dict[str, Any]) -> None:
    assert len(path["entered"]) <= 50, "\n".join(path["entered"])


def test_with_rules_at_most_96_files_run(path: dict[str, Any]) -> None:
    assert 50 < len(path["every"]) <= 96, "\n".join(path["every"])


def test_one_recipe_is_finalized_once_and_planned_once_for_one_container(path: dict[str, Any]) -> None:
    calls = {name: count for name, count in path["calls"].items() if name}
    assert calls == {"constructed": 1, "finalized": 1, "contained": 1, "planned": 1}


def test_the_rooms_are_entered_downhill(path: dict[str, Any]) -> None:
    rooms = list(dict.fromkeys(name.partition("/")[0] for name in path["entered"]))
    assert [room for room in rooms if room in ROOMS] == list(ROOMS)
