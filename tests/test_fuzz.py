"""The fuzzing of `make fuzz` finds planted faults, and each of its areas reads its seeds."""

import signal
from pathlib import Path
from random import Random

import pytest

from bridge.errors import PayloadError
from tests import fuzz
from tests.fuzz_areas import NAMES_OF_AREAS, Area, made, read_case

SLOW = ("checkpoints", "commands", "recipe files", "overrides of a tree")
"""A training run of one step; a composition for each case."""


@pytest.mark.parametrize("fault", ["IndexError", "LateError", "open ('", "800 characters"])
def test_a_planted_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(case: bytes) -> None:
        if fault == "IndexError":
            case[1000]
        while fault == "LateError":
            pass
        if fault == "800 characters":
            error = PayloadError("")
            error.args = ("x " * 400,)
            raise error
        (tmp_path / "outside").write_text("")

    monkeypatch.setattr(fuzz, "LIMIT_SECONDS", 0.1)
    before = signal.getsignal(signal.SIGPROF)
    guard = fuzz.Guard(tmp_path / "inside")
    area = Area(name="planted", seeds=[b"a file"], words=[b"a word"], read=read)
    try:
        assert fault in str(fuzz.fuzzed(area, guard, 1, 1))
    finally:
        signal.signal(signal.SIGPROF, before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in NAMES_OF_AREAS if name not in SLOW])
def test_an_area_reads_its_seeds(name: str, tmp_path: Path) -> None:
    area = made(name, tmp_path, None)
    for case in area.seeds[:6]:
        read_case(area, case)
    for number in range(20):
        read_case(area, fuzz.drawn(area, Random(number)))  # noqa: S311  no secret
