"""The sentence on whether a run fits its GPU."""

import pytest

from bridge.plan.memory_report import MEMORY_KINDS, RankMemory
from bridge.report.plan.memory_table import describe_fit

GIB = 2**30


def rank(total: int) -> RankMemory:
    sizes = dict.fromkeys(MEMORY_KINDS, 0) | {"weights": total}
    return RankMemory(stage=0, data_rank=0, parameters=1, bytes_of=sizes, host_bytes_of={}, step_bytes=0)


@pytest.mark.parametrize(
    ("total", "verdict"),
    [
        (79 * GIB, "fits"),
        (80 * GIB - 299 * 2**20, "may not fit, with 299 MiB left for what is not counted"),
        (80 * GIB, "may not fit, with 0 B left for what is not counted"),
        (80 * GIB + 1, "does not fit"),
    ],
)
def test_a_run_fits_where_workspaces_do_too(total: int, verdict: str) -> None:
    sentence = describe_fit(rank(total), 80 * GIB, (), ())
    assert sentence.partition(": ")[2] == verdict


def test_a_run_with_a_part_that_is_not_counted_has_no_verdict() -> None:
    assert describe_fit(rank(GIB), 80 * GIB, ("a vision tower",), ()).endswith("; not counted: a vision tower")
