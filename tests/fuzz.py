"""Fuzzing: `python -m tests.fuzz --seconds 600`, or `make fuzz`. Whatever is read ends in a result or in our own error.

Each area of `tests.fuzz_areas` gets an equal share of the time. Hypothesis draws the cases; with `--guided` libFuzzer
does, through atheris (`tests.fuzz_guided`). A case fails where an error is raised that is no `BridgeError`, where a
line of that error is too long, where the answer takes more than 5 s of CPU time, and where anything is started,
connected to or written outside the run's folder, which an audit hook of Python sees. Exit code 1: a case failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz_areas import NAMES_OF_AREAS, Area, made, read_case, warm

LIMIT_SECONDS = 5.0
ROUND = 2000
"""Cases that hypothesis draws from one seed."""
STARTS = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "socket.connect")
WRITES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod")


class LateError(BaseException):
    """A case that took too long; not an `Exception`, which a reader of foreign files may catch."""


class Guard:
    """Notes what a case starts or writes outside a folder, through Python's audit events, and ends a late one."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.is_on = False
        self.seen: list[str] = []
        self.count = 0
        self.longest_seconds = 0.0
        sys.addaudithook(self.hear)
        signal.signal(signal.SIGPROF, self.late)

    @staticmethod
    def late(_number: int, _frame: object) -> None:
        raise LateError

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        is_write = event in WRITES or (event == "open" and self.is_writing(arguments))
        if event.startswith(STARTS) or (is_write and not self.is_inside(arguments[0])):
            self.seen.append(f"{event} {arguments!r:.200}")

    @staticmethod
    def is_writing(arguments: tuple[Any, ...]) -> bool:
        _path, mode, flags = arguments
        return any(letter in str(mode or "") for letter in "wax+") or bool(int(flags or 0) & (os.O_WRONLY | os.O_RDWR))

    def is_inside(self, path: object) -> bool:
        if isinstance(path, int) or str(path) == os.devnull:
            return True
        return os.path.realpath(os.fsdecode(path)).startswith(self.folder)  # type: ignore[arg-type]

    def examine(self, area: Area, case: bytes) -> None:
        """Read a case and count it; whatever is no result and no error of ours is raised."""
        began = time.process_time()
        self.count += 1
        self.is_on = True
        # again and again: Python does not hear a signal that the kernel gives to a thread of another library
        signal.setitimer(signal.ITIMER_PROF, LIMIT_SECONDS, LIMIT_SECONDS)
        try:
            read_case(area, case)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self.is_on = False
            seen, self.seen = self.seen, []
        self.longest_seconds = max(self.longest_seconds, time.process_time() - began)
        assert not seen, seen

    def line(self, area: Area, faults: int) -> str:
        """Return the result of an area as a line."""
        failed = f", {faults} FAILED" if faults else ""
        return f"{area.name}: {self.count} cases, longest {self.longest_seconds:.2f} s{failed}"


@contextlib.contextmanager
def working_folder() -> Iterator[Path]:
    """Make the folder of a run and go there."""
    sys.dont_write_bytecode = True
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        folder = Path(os.path.realpath(place))
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder)
        yield folder


def spliced(text: bytes, edits: list[tuple[int, bytes, int]]) -> bytes:
    """Return a text with splices in it, and some bytes less."""
    for number, splice, gone in edits:
        at = number % (len(text) + 1)
        text = text[:at] + splice + text[at + gone :]
    return text


def cases(area: Area) -> st.SearchStrategy[bytes]:
    """Return the cases of an area: a seed with splices, or some bytes; of mappings a seed and bytes that edit it."""
    starts, some = st.sampled_from(area.seeds), st.binary(max_size=60)
    if not area.words:
        return st.builds(bytes.__add__, starts, some)
    edit = st.tuples(st.integers(0, 2**16), st.sampled_from(area.words), st.sampled_from([0, 0, 1, 7]))
    return st.builds(spliced, starts, st.lists(edit, min_size=1, max_size=4)) | st.binary(max_size=300)


def draw(area: Area, guard: Guard, seconds: float, number: int) -> str:
    """Read cases of hypothesis until the time is over or one fails; return the fault."""
    ends = time.monotonic() + seconds

    def one(case: bytes) -> None:
        if time.monotonic() < ends:
            guard.examine(area, case)

    drawn = settings(
        max_examples=ROUND,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    while time.monotonic() < ends:
        try:
            seed(number)(drawn(given(cases(area))(one)))()
        except (Exception, LateError):  # noqa: BLE001  the fault that the case found
            return traceback.format_exc(limit=-12)
        number += 1
    return ""


def run() -> int:
    """Fuzz every area for an equal share of the time, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="for all areas together (default: 60)")
    parser.add_argument("--seed", type=int, default=None, help="the first seed (default: another one each time)")
    parser.add_argument("--only", default="", help="areas whose name has this text")
    parser.add_argument("--more", type=Path, default=None, help="folder with other foreign files to begin with")
    parser.add_argument("--guided", action="store_true", help="let libFuzzer make the cases: pip install atheris")
    parser.add_argument("--keep", type=Path, default=None, help="with --guided: folder of inputs that reached new code")
    chosen = parser.parse_args()
    first = random.randrange(2**31) if chosen.seed is None else chosen.seed  # noqa: S311  no secret
    names = [name for name in NAMES_OF_AREAS if chosen.only in name]
    more = chosen.more.resolve() if chosen.more else None
    keep = chosen.keep.resolve() if chosen.keep else None
    faults = 0
    for name in names:
        words = [name, str(chosen.seconds / len(names)), str(first), str(more or ""), str(keep or "")]
        if chosen.guided:  # libFuzzer ends its process
            words = [sys.executable, "-W", "ignore", "-m", "tests.fuzz_guided", *words]
            faults += subprocess.run(words, check=False).returncode != 0
            continue
        with working_folder() as folder:
            area = made(name, folder, more)
            warm(area)
            guard = Guard(folder)
            fault = draw(area, guard, chosen.seconds / len(names), first)
            guard.is_on = False
        print(guard.line(area, int(bool(fault))), flush=True)  # noqa: T201
        faults += bool(fault)
        if fault:
            print(f"{fault:.6000}", flush=True)  # noqa: T201
    print(f"from seed {first} on, {faults} areas with faults")  # noqa: T201
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(run())
