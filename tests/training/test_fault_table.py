"""The page of faults: it has every fault, and the runs behind it give the same rows."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tests.training.fault_table import BEGIN, END, FAULTS, Bench, Row, table
from tests.training.grid import slow

PAGE = (Path(__file__).parents[2] / "docs" / "explain" / "faults.md").read_text()
TABLE = PAGE.partition(BEGIN)[2].partition(END)[0].strip()


def test_the_page_has_every_fault_and_no_step_lost_none_silent_no_traceback() -> None:
    totals, _, *lines = TABLE.splitlines()
    assert totals == (
        f"{len(FAULTS)} faults: 0 steps lost beyond the last checkpoint, 0 silent continuations, 0 tracebacks."
    )
    shown = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in lines[2:]]
    assert shown == [(fault.name, fault.moment) for fault in FAULTS]


def test_the_totals_count_a_lost_step_a_silent_continuation_and_a_traceback() -> None:
    row = Row(
        name="a", moment="b", codes=(0,), said=(), kept=2, resumed=None, skipped=(), differing=0, missing=0,
        has_traceback=False,
    )  # fmt: skip
    changes = ({"resumed": 0}, {"missing": 1}, {"differing": 1}, {"has_traceback": True})
    totals = [table([dataclasses.replace(row, **change)]).partition("\n")[0] for change in changes]
    numbers = [re.findall(r"\d+", line)[1:] for line in totals]
    assert numbers == [["1", "0", "0"], ["1", "0", "0"], ["0", "1", "0"], ["0", "0", "1"]]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("number", [slow(number) for number in range(len(FAULTS))])
def test_a_fault_ends_as_the_page_says(number: int, bench: Bench) -> None:
    line = table([bench.observe(FAULTS[number])]).splitlines()[-1]
    assert line in TABLE
