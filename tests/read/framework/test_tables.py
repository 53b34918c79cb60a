"""The tables of frameworks with settings of their own: each row has a source, and names fields that Megatron has."""

import pytest

from bridge.read.framework.framework_table import load_framework_table
from bridge.read.framework.hf_config import list_unknown_fields
from bridge.read.framework.launch_reader_registry import LAUNCH_READERS
from bridge.read.framework.yaml_reader_registry import TREE_READERS
from bridge.read.framework_signs import recognise_first_launch
from bridge.read.launch.script_launches import read_launches
from bridge.target.fields import OWNER_FIELDS

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


@pytest.mark.parametrize(
    ("command", "tree"),
    [
        ("uv run examples/run_grpo.py --config a.yaml policy.precision=float16", "nemo_rl"),
        ("python3 -m verl.trainer.main_ppo model_engine=megatron", "verl"),
        ("megatron sft --model m", "ms_swift"),
        ("python examples/start_rlvr_pipeline.py --config_path a --config_name b", "roll"),
        ("python pretrain_gpt.py --bf16", ""),
    ],
)
def test_a_launch_names_the_table_that_reads_it(command: str, tree: str) -> None:
    found = recognise_first_launch(read_launches(f"#!/bin/bash\n{command}\n"))
    assert (found.tree if found is not None else "") == tree
