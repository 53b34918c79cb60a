"""The tables of frameworks with settings of their own: each row has a source, and names fields that Megatron has."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from bridge.read.foreign.row_files import load_rows
from bridge.read.framework.framework_table import load_framework_table
from bridge.read.framework.hf_config import list_unknown_fields
from bridge.read.framework.launch_reader_registry import LAUNCH_READERS, SCRIPT_SIGNS
from bridge.read.framework.yaml_reader_registry import TREE_READERS
from bridge.read.framework_signs import SIGNS_FOLDER, recognise_first_launch
from bridge.read.launch.script_launches import read_launches
from bridge.read.run_file import FRAMEWORK_KEY_PATTERN
from bridge.target.fields import OWNER_FIELDS

LAUNCHES = [
    ("uv run examples/run_grpo.py --config a.yaml policy.precision=float16", "nemo_rl"),
    ("python3 -m verl.trainer.main_ppo model_engine=megatron", "verl"),
    ("megatron sft --model m", "ms_swift"),
    ("python examples/start_rlvr_pipeline.py --config_path a --config_name b", "roll"),
    ("python scripts/training/run_recipe.py --recipe llama3_8b_pretrain_config", "megatron_bridge"),
    ("./primus-cli direct -- train pretrain --config a.yaml", "primus"),
    ("python pretrain_gpt.py --bf16", ""),
]
"""Launches, each with the table of its reader; empty for none."""
NO_FIELD_OF_A_CONFIG = {"model.calculate_per_token_loss"}


@pytest.mark.parametrize("name", TREE_READERS)
def test_settings_of_a_table_are_fields_of_megatron(name: str) -> None:
    table = load_framework_table(name)
    paths = [path for row in table.start for path in (*row.sets, *row.copies)]
    paths += [path for targets in table.fields.values() for path in targets]
    paths += [row.target_setting for row in table.dropped_options if row.target_setting]
    for path in paths:
        role, _, field = path.partition(".")
        assert field in OWNER_FIELDS[role], f"{name}: {path}"


@pytest.mark.parametrize("name", TREE_READERS)
def test_each_row_has_a_file_and_the_table_a_commit(name: str) -> None:
    table = load_framework_table(name)
    assert len(table.commit) == 40
    rows = (*table.start, *table.own, *table.dropped_options)
    assert all("/" in row.source for row in rows)
    assert table.checkpoint["source"]
    assert table.release["source"]


def test_a_setting_of_the_checkpoint_is_a_field_of_the_model() -> None:
    assert set(list_unknown_fields(is_read=False)) <= OWNER_FIELDS["model"].keys()
    assert len(set(list_unknown_fields(is_read=False))) == len(list_unknown_fields(is_read=False))


def test_a_framework_that_reads_files_reads_launches_too() -> None:
    assert TREE_READERS.keys() <= LAUNCH_READERS.keys()


@pytest.mark.parametrize(("command", "tree"), LAUNCHES)
def test_a_launch_names_the_table_that_reads_it(command: str, tree: str) -> None:
    found = recognise_first_launch(read_launches(f"#!/bin/bash\n{command}\n"))
    assert (found.tree if found is not None else "") == tree


def read_before_signs(columns: Mapping[str, Any], pattern: re.Pattern[bytes]) -> bool:
    """Return whether each file that fits a row of `files` has a top-level key that a pattern finds."""

    def is_found(setting: str) -> bool:
        return pattern.search(f"{setting.partition('.')[0]}:".encode()) is not None

    required = list(columns.get("all", ()))
    if "matches" in columns:
        required.append(columns["matches"][0])
    if any(is_found(setting) for setting in required):
        return True
    alternatives = [columns[column] for column in ("any", "blocks") if column in columns]
    return any(all(is_found(setting) for setting in settings) for settings in alternatives)


def test_each_file_of_a_framework_that_is_read_has_a_key_that_is_looked_for() -> None:
    uncovered = []
    for name, row in load_rows("framework_signs", SIGNS_FOLDER)["frameworks"].items():
        for columns in row.get("files", ()):
            is_read = columns.get("tree", row.get("tree", "")) in TREE_READERS or columns.get("reads", False)
            if is_read and not read_before_signs(columns, FRAMEWORK_KEY_PATTERN):
                uncovered.append(f"{name}: {columns['evidence']}")
    assert uncovered == [], "add a key of the file to FRAMEWORK_KEY_PATTERN in bridge/read/run_file.py"


def test_the_launches_of_each_table_with_a_reader_are_looked_for() -> None:
    commands = dict.fromkeys(LAUNCH_READERS, "")
    commands |= {table: command for command, table in LAUNCHES}
    without_launch = [table for table in LAUNCH_READERS if not commands[table]]
    assert without_launch == [], "add a launch to LAUNCHES in this file"
    uncovered = [command for command, table in LAUNCHES if table and not SCRIPT_SIGNS.search(command)]
    assert uncovered == [], "add a word of the launch to SCRIPT_SIGNS in launch_reader_registry.py"
