"""The fuzzing of `make fuzz` finds planted faults, and each of its areas reads its seeds."""

import signal
from pathlib import Path

import pytest

from bridge.errors import PayloadError
from tests import fuzz
from tests.fuzz_areas import NAMES_OF_AREAS, Area, made, read_case

SLOW = ("checkpoints", "recipe files", "overrides of a tree")
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
        assert fault in fuzz.draw(area, guard, 20, 1)
    finally:
        signal.signal(signal.SIGPROF, before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in NAMES_OF_AREAS if name not in SLOW])
def test_an_area_reads_its_seeds(name: str, tmp_path: Path) -> None:
    area = made(name, tmp_path, None)
    for number, case in enumerate(area.seeds[:6]):
        read_case(area, case)
        read_case(area, fuzz.spliced(case, [(number * 7, word, 1) for word in area.words[number : number + 2]]))
