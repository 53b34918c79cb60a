"""The tables of frameworks with settings of their own: each row has a source, and names fields that Megatron has."""

import pytest

from bridge.read.framework.files import TREES
from bridge.read.framework.hf_config import decided_fields
from bridge.read.framework.launches import READERS
from bridge.read.framework.table import framework_table
from bridge.read.framework_signs import recognise_first
from bridge.read.launch.alternatives import launches
from bridge.target.fields import FIELDS

NO_FIELD_OF_A_CONFIG = {"model.calculate_per_token_loss"}


@pytest.mark.parametrize("name", TREES)
def test_settings_of_a_table_are_fields_of_megatron(name: str) -> None:
    table = framework_table(name)
    paths = [path for row in table.start for path in (*row.sets, *row.copies)]
    paths += [path for targets in table.fields.values() for path in targets]
    paths += [row.into for row in table.drops if row.into]
    for path in paths:
        role, _, field = path.partition(".")
        assert field in FIELDS[role], f"{name}: {path}"


@pytest.mark.parametrize("name", TREES)
def test_each_row_has_a_file_and_the_table_a_commit(name: str) -> None:
    table = framework_table(name)
    assert len(table.commit) == 40
    rows = (*table.start, *table.own, *table.drops)
    assert all("/" in row.source for row in rows)
    assert table.checkpoint["source"]
    assert table.release["source"]


def test_a_setting_of_the_checkpoint_is_a_field_of_the_model() -> None:
    assert set(decided_fields(is_read=False)) <= FIELDS["model"].keys()
    assert len(set(decided_fields(is_read=False))) == len(decided_fields(is_read=False))


def test_a_framework_that_reads_files_reads_launches_too() -> None:
    assert TREES.keys() <= READERS.keys()


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
    found = recognise_first(launches(f"#!/bin/bash\n{command}\n"))
    assert (found.tree if found is not None else "") == tree
