"""The tables of frameworks on top of Megatron Core: each fact has a source, and no name hides one of Megatron's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.read.framework import framework_table
from bridge.read.framework.framework_table import FrameworkTable, TableError, list_table_names, load_framework_table
from bridge.read.megatron_lm.unread_options import UNREAD_ARGUMENTS
from bridge.read.startup_rows import StartupSettings
from bridge.target.fields import OWNER_FIELDS

TABLES = list_table_names()
FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)*(?:\.\w+)?")


@pytest.mark.parametrize("name", TABLES)
def test_every_fact_of_a_table_names_a_file_of_one_commit(name: str) -> None:
    table = load_framework_table(name)
    assert re.fullmatch(r"[0-9a-f]{40}", table.commit)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", table.date)
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", table.repository)
    facts = [*table.start, *table.own, *table.variables, *table.dropped_options, *table.environment.values()]
    assert facts
    for fact in facts:
        assert FILE.match(fact.source), fact
        assert "/" in fact.source or "." in fact.source, fact


@pytest.mark.parametrize("name", TABLES)
def test_every_setting_of_a_table_is_one_of_megatrons(name: str) -> None:
    for path in settings_in(load_framework_table(name)):
        role, _, field = path.partition(".")
        assert field in OWNER_FIELDS[role], path


def settings_in(table: FrameworkTable) -> set[str]:
    """Return the settings that a table sets, asks for or opens."""
    found: set[str] = set()
    for row in table.start:
        found |= {*row.sets, *row.copies, *row.copies.values(), *row.when, *row.unless, *row.where, *row.where_not}
    for own in (*table.own, *table.variables):
        found |= set(own.opened_settings)
    return {path for path in found if path.partition(".")[0] in OWNER_FIELDS}


@pytest.mark.parametrize("name", TABLES)
def test_a_harmless_name_hides_no_argument_that_is_named_as_unread(name: str) -> None:
    for row in load_framework_table(name).own:
        if not row.sentence and not row.opened_settings:
            assert not [argument for argument in UNREAD_ARGUMENTS if row.names.fullmatch(argument)], row.purpose


@pytest.mark.parametrize("name", TABLES)
def test_the_words_of_a_table_can_be_put_in_a_sentence(name: str) -> None:
    table = load_framework_table(name)
    for row in (*table.own, *table.variables):
        assert "{" not in row.sentence.format(option="--x", value="1")


def test_the_page_of_frameworks_is_what_the_tables_say() -> None:
    script = Path(__file__).parents[2] / "scripts" / "frameworks.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_setting_of_a_start_has_no_value() -> None:
    start = StartupSettings(sections={"model": {}}, own_fields={"argument.mock_data": True}, gpus=None)
    assert start.value("argument.mock_data") is True


WHOLE_TABLE = (
    "{title: foo, repository: a/foo, commit: abc, date: 2026-01-01, settings: Megatron-LM, reads: scripts, "
    "own: [{names: x, for: a name, source: foo.py}]}"
)


@pytest.mark.parametrize(
    ("written", "changed", "message"),
    [
        ("own:", "owns:", "foo.yaml: no column 'owns'. Columns: "),
        ("for:", "say:", "foo.yaml: own: no column 'say'. Columns: "),
        ("repository: a/foo, ", "", "foo.yaml: the column 'repository' is missing."),
        ("Megatron-LM", "megatron", "foo.yaml: settings must be one of Megatron-LM, Megatron Bridge, Megatron Core"),
    ],
)
def test_a_misspelt_or_missing_column_of_a_table_is_named(
    written: str, changed: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framework_table, "TABLES_FOLDER", tmp_path)
    load = load_framework_table.__wrapped__
    (tmp_path / "foo.yaml").write_text(WHOLE_TABLE)
    assert load("foo").title == "foo"
    (tmp_path / "foo.yaml").write_text(WHOLE_TABLE.replace(written, changed))
    with pytest.raises(TableError, match=re.escape(message)):
        load("foo")
