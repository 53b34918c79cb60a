"""The support table of the README: the cells of the script that makes it, and a cell that is trained."""

import sys
from pathlib import Path

import pytest

from bridge.rehearse.release import Release, list_local_releases
from bridge.target.versions import get_installed_version
from scripts import support

ROOT = Path(__file__).resolve().parents[2]
needs_te = pytest.mark.skipif(
    not (Path(sys.prefix) / "te" / "transformer_engine").is_dir(),
    reason=f"needs Transformer Engine's Python in {Path(sys.prefix) / 'te'} (make setup)",
)


def rows_of(page: str) -> list[list[str]]:
    """Return the cells of the table between the marks, its heads first."""
    begin, end = support.MARKS
    text = page.partition(begin)[2].partition(end)[0]
    rows = []
    for line in text.splitlines():
        if line.startswith("| "):
            rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def test_the_readme_has_a_cell_for_each_kind_release_and_backend():
    heads, *rows = rows_of((ROOT / "README.md").read_text(encoding="utf-8"))
    first, *columns, proof = heads
    assert first == "Kind of model"
    assert [row[0] for row in rows] == [*support.KINDS]
    assert [column.split()[1] for column in columns] == [*support.BACKENDS] * (len(columns) // len(support.BACKENDS))
    assert len({column.split()[0] for column in columns}) == 2
    proved = support.proof_of(support.PROOF)
    assert proof == proved.title
    for kind, *cells, on_gpu in rows:
        assert len(cells) == len(columns)
        for cell in cells:
            assert cell == "yes" or cell.startswith("no: ")
        assert on_gpu == ("yes" if kind in proved.kinds else support.NOT_RUN)


def test_the_heads_are_the_releases_at_hand_with_each_backend():
    proof = support.proof_of(support.PROOF)
    heads = support.heads(list_local_releases(), proof)
    assert len(heads) == 2 + len(support.BACKENDS) * len(list_local_releases())
    assert f"{get_installed_version('mcore')} te_cpu" in heads


@needs_te
def test_a_cell_is_a_run_as_planned_and_a_failure_is_its_last_line(monkeypatch):
    here = Release(version=get_installed_version("mcore"))
    assert support.failures_of(["sparse attention"], "te_cpu", "mxfp8", here) == {"sparse attention": None}
    failures = support.failures_of(["dense"], "emulated", "no_such_recipe", here)
    assert "no_such_recipe" in str(failures["dense"])


def test_a_cell_names_each_recipe_that_fails():
    assert support.cell({"fp8_current": None, "mxfp8": None}) == "yes"
    assert support.cell({"fp8_current": None, "mxfp8": "a | b"}) == "no: mxfp8: a \\| b"


def test_a_page_gets_the_table_between_its_marks_alone():
    begin, end = support.MARKS
    page = f"before\n{begin}\nold\n{end}\nafter\n"
    assert support.written(page, "new") == f"before\n{begin}\n\nnew\n\n{end}\nafter\n"
    assert support.written(support.written(page, "old"), "new") == support.written(page, "new")
