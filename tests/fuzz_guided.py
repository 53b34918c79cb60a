"""Coverage-guided fuzzing: `python -m tests.fuzz_guided --only "foreign files" --seconds 300`.

The cases are those of `tests.fuzz`. atheris (`pip install atheris`) chooses the bytes that hypothesis draws them from,
so that new cases reach new branches of `bridge.interop` and the readers. Each area runs in a fork. Exit code 1: a case
failed; libFuzzer prints its bytes, and the traceback stands above them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import atheris
from hypothesis import HealthCheck, given, settings

with atheris.instrument_imports(
    include=["bridge.interop", "bridge.front", "bridge.checkpoint", "bridge.registry", "bridge.precision"]
):
    from tests import fuzz


def guided(area: fuzz.Area, guard: fuzz.Guard, seconds: int) -> None:
    """Fuzz an area for some seconds, and end this process."""

    @settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(area.cases)
    def one(case: object) -> None:
        fuzz.examine(area, guard, case)

    print(f"{area.name}:", flush=True)  # noqa: T201
    options = [f"-max_total_time={seconds}", "-print_final_stats=1", "-verbosity=0", "-timeout=30"]
    atheris.Setup([sys.argv[0], *options], one.hypothesis.fuzz_one_input)  # type: ignore[attr-defined]
    atheris.Fuzz()


def main() -> int:
    """Fuzz the areas for an equal share of the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="for all areas together (default: 60)")
    parser.add_argument("--only", default="", help="areas whose name has this text")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(os.path.realpath(place))
        fuzz.prepare(folder)
        known = [area for area in fuzz.areas(folder) if chosen.only in area.name]
        failed = 0
        for area in known:
            child = os.fork()
            if child == 0:
                guided(area, fuzz.Guard(folder), chosen.seconds // len(known))
            failed += bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
