"""Published recipes of Megatron Bridge, as its own code saves them before and after its runtime: both answered alike.

The files lie beside the repository, in ``../shared/published``; its index names the GPUs of each.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from bridge.cli.main import main
from bridge.errors import RunConfigError
from bridge.read.run_file import load_file_reading

PUBLISHED = Path(__file__).parents[2].parent / "shared" / "published"
COMMANDS = ("check", "plan", "memory", "plan --align", "plan --modules")
pytestmark = pytest.mark.skipif(not PUBLISHED.is_dir(), reason="needs the published recipes in ../shared/published")
REPLACED = {("PB123", "model.first_last_layers_bf16"), ("PB411", "data.seq_length")}
"""Findings about values that the runtime replaces; the file after it holds the new values alone."""


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    for name in ("before", "runtime"):
        with tarfile.open(PUBLISHED / f"{name}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
    return folder


def targets() -> dict[str, str]:
    """Return name of a recipe -> its GPUs as a target."""
    with (PUBLISHED / "index.tsv").open(encoding="utf-8") as file:
        return {row["name"]: f"{row['gpu']}x{row['num_gpus']}" for row in csv.DictReader(file, delimiter="\t")}


def repaired() -> set[str]:
    """Return the recipes that Megatron Bridge rejects, whose second file was made with what it rejects put right."""
    with (PUBLISHED / "index.tsv").open(encoding="utf-8") as file:
        return {row["name"] for row in csv.DictReader(file, delimiter="\t") if "PEER REJECTS" in row["notes"]}


def answer(command: str, path: Path, target: str) -> Any:
    """Return the JSON of a command without what it says of the file, or the sentence of its refusal."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        main([*command.split(), "--config", str(path), "--target", target, "--json"])
    if not out.getvalue():
        return err.getvalue().partition(", got")[0]
    content = json.loads(out.getvalue())
    content.pop("read")
    found = content["findings" if command == "check" else "check"] if command != "plan --modules" else []
    ids = {(one["id"], one["path"]) for one in found} - REPLACED
    return ids if command == "check" else {**content, "check": ids}


def without_findings(answered: Any) -> Any:
    return (
        {**answered, "check": None} if isinstance(answered, dict) else None if isinstance(answered, set) else answered
    )


def is_cut(path: Path) -> bool:
    """Return whether a file names an object without its content: Megatron Bridge saves a pipeline layout like that."""
    try:
        return any("without its content" in line for line in load_file_reading(path).uncertainty.open_points)
    except RunConfigError:
        return False


def differences(recipes: Path, names: list[str]) -> list[str]:
    """Return a line for each command whose answers about the two files of a recipe differ."""
    found, places, rejected = [], targets(), repaired()
    for name in names:
        before, runtime = (recipes / kind / f"{name}.yaml" for kind in ("before", "runtime"))
        if is_cut(runtime):
            continue
        for command in COMMANDS:
            one, two = (answer(command, path, places[name]) for path in (before, runtime))
            if name in rejected:
                one, two = without_findings(one), without_findings(two)
            if one != two:
                found.append(f"{command} of {name}: {one!s:.200} -> {two!s:.200}")
    return found


def test_a_sample_of_recipes_is_answered_alike_before_and_after_its_runtime(recipes: Path) -> None:
    names = sorted(targets())[:: len(targets()) // 6]
    assert differences(recipes, names) == []


@pytest.mark.slow
def test_every_recipe_is_answered_alike_before_and_after_its_runtime(recipes: Path) -> None:
    names = sorted(targets())
    assert differences(recipes, names) == []
    assert sum(is_cut(recipes / "runtime" / f"{name}.yaml") for name in names) <= len(names) // 100


@pytest.mark.slow
def test_a_recipe_is_refused_for_a_reason_that_is_true_alone(recipes: Path) -> None:
    reason = "model: a diffusion model has no layers of a language model"
    refused = {
        f"{command} of {name}": said
        for name, target in targets().items()
        for command in COMMANDS
        if isinstance(said := answer(command, recipes / "before" / f"{name}.yaml", target), str)
    }
    assert {where: said for where, said in refused.items() if not said.startswith(reason)} == {}
