"""The page about adding a framework, run as it stands."""

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from bridge.cli.main import main
from bridge.preflight.run import Run
from bridge.read import framework_signs, run_file
from bridge.read.framework import framework_table, launch_reader_registry, yaml_reader_registry
from tests.read.framework.test_tables import read_before_signs

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/howto/add-a-framework.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(yaml|python|console|text)\n(.*?)```", PAGE, re.DOTALL)
TABLE, SIGNS, PATTERNS, CODE, ROWS, RUN, SESSION = (text for _, text in BLOCKS)


@pytest.fixture
def octo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The page's framework, as if its files were written."""
    tables = tmp_path / "tables"
    shutil.copytree(ROOT / "bridge/read/framework/tables", tables)
    (tables / "octo.yaml").write_text(TABLE)
    monkeypatch.setattr(framework_table, "TABLES_FOLDER", tables)
    signs = (ROOT / "bridge/read/framework_signs.yaml").read_text(encoding="utf-8")
    (tmp_path / "framework_signs.yaml").write_text(signs + SIGNS)
    monkeypatch.setattr(framework_signs, "SIGNS_FOLDER", tmp_path)
    module = ModuleType("bridge.read.framework.octo")
    exec(compile(CODE, "octo.py", "exec"), vars(module))  # noqa: S102  the page's own code
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(yaml_reader_registry.TREE_READERS, "octo", module.read_config)
    monkeypatch.setitem(launch_reader_registry.LAUNCH_READERS, "octo", module.read_launch)
    key, word = (line.partition(": ")[2] for line in PATTERNS.splitlines())
    pattern = run_file.FRAMEWORK_KEY_PATTERN.pattern.replace(b"system)", f"system|{key})".encode())
    keys = re.compile(pattern, re.MULTILINE)
    monkeypatch.setattr(run_file, "FRAMEWORK_KEY_PATTERN", keys)
    words = re.compile(f"{launch_reader_registry.SCRIPT_SIGNS.pattern}|{word}")
    monkeypatch.setattr(launch_reader_registry, "SCRIPT_SIGNS", words)
    caches = (
        framework_signs._load_frameworks,
        framework_table.load_framework_table,
        framework_table.find_table_by_title,
    )
    for cached in caches:
        cached.cache_clear()
    yield module
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("octo")
def test_a_file_of_the_page_is_read(run_of: Callable[..., Run]) -> None:
    run = run_of(RUN, "run.yaml")
    assert (run.model["bf16"], run.model["tensor_model_parallel_size"]) == (True, 2)
    assert run.origin_of("model.bf16") == "Octo at start"
    assert run.section("train")["micro_batch_size"] == 2
    assert run.find_decider("model.normalization") == "config.json of org/a-model"


@pytest.mark.usefixtures("octo")
def test_a_launch_of_the_page_is_read(tmp_path: Path, run_of: Callable[..., Run]) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    assert run_of("#!/bin/bash\npython octo/train.py run.yaml\n", "run.sh").model["tensor_model_parallel_size"] == 2


@pytest.mark.usefixtures("octo")
def test_the_session_of_the_page_is_a_real_one(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    command, _, shown = SESSION.partition("\n")
    assert main(command.removeprefix("$ precision-bridge ").split()) == 0
    assert capsys.readouterr().out == shown


def test_a_key_of_the_page_that_no_pattern_has_is_noticed() -> None:
    assert not read_before_signs({"matches": ["octo.engine", "megatron"]}, run_file.FRAMEWORK_KEY_PATTERN)
