"""Fuzzing: `python -m tests.fuzz --seconds 600`, or `make fuzz`. Whatever is read ends in a result or in our own error.

Each area of `tests.fuzz_areas` gets an equal share of the time. Cases are drawn from a seed; with `--guided` libFuzzer
draws them, through atheris (`tests.fuzz_guided`). A case fails where an error is raised that is no `BridgeError`, where
a line of that error is too long, where the answer takes more than 5 s of CPU time, and where anything is started,
connected to or written outside the run's folder, which an audit hook of Python sees. Exit code 1: a case failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz_areas import NAMES_OF_AREAS, Area, made, read_case, warm

LIMIT_SECONDS = 5.0
STARTS = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "socket.connect")
WRITES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod")


class LateError(BaseException):
    """A case that took too long; not an `Exception`, which a reader of foreign files may catch."""


class Guard:
    """Notes what a case starts or writes outside a folder, through Python's audit events, and ends a late one."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = str(folder)
        self.is_on = False
        self.seen: list[str] = []
        self.begin()
        sys.addaudithook(self.hear)
        signal.signal(signal.SIGPROF, self.late)

    def begin(self) -> None:
        """Count anew."""
        self.count = 0
        self.longest_seconds = 0.0

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
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108  a case writes a file
    with tempfile.TemporaryDirectory(dir=memory) as place, contextlib.chdir(place):
        yield Path(os.path.realpath(place))


def drawn(area: Area, random: Random) -> bytes:
    """Return a case of an area: a seed with splices in it; of mappings a seed and bytes that edit it."""
    case = random.choice(area.seeds)
    if not area.words:
        return case + random.randbytes(random.randrange(60))
    if random.random() < 0.05:
        return random.randbytes(random.randrange(300))
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(case) + 1)
        case = case[:at] + random.choice(area.words) + case[at + random.choice((0, 0, 1, 7)) :]
    return case


@dataclass
class Faults:
    """The faults of an area, each once: the place where it was raised, its smallest case, and the traceback of that."""

    found: dict[str, tuple[bytes, str]] = field(default_factory=dict)

    def examine(self, guard: Guard, area: Area, case: bytes) -> None:
        """Read a case, and keep what fails."""
        try:
            guard.examine(area, case)
        except (Exception, LateError) as error:  # noqa: BLE001  the fault that the case found
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{type(error).__name__} in {frame.filename}:{frame.lineno}"
            if place not in self.found or len(case) < len(self.found[place][0]):
                self.found[place] = case, traceback.format_exc(limit=-12)

    def __str__(self) -> str:
        return "\n".join(f"{case!r:.3000}\n{text:.6000}" for case, text in self.found.values())


def fuzzed(area: Area, guard: Guard, seconds: float, seed: int) -> Faults:
    """Read cases of an area until the time is over, and print what they came to."""
    random, faults, began = Random(seed), Faults(), time.process_time()  # noqa: S311  no secret
    ends = time.monotonic() + seconds
    guard.begin()
    while time.monotonic() < ends:
        faults.examine(guard, area, drawn(area, random))
    rate = guard.count / (time.process_time() - began)
    print(f"{guard.line(area, len(faults.found))}, {rate:,.0f} per second of CPU time", flush=True)  # noqa: T201
    print(str(faults), end="", flush=True)  # noqa: T201
    return faults


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
    first = Random().randrange(2**31) if chosen.seed is None else chosen.seed  # noqa: S311  no secret
    names = [name for name in NAMES_OF_AREAS if chosen.only in name]
    more = chosen.more.resolve() if chosen.more else None
    keep = chosen.keep.resolve() if chosen.keep else None
    faults = cases = 0
    guard = Guard("")
    for name in names:
        words = [name, str(chosen.seconds / len(names)), str(first), str(more or ""), str(keep or "")]
        if chosen.guided:  # libFuzzer ends its process
            words = [sys.executable, "-W", "ignore", "-m", "tests.fuzz_guided", *words]
            faults += subprocess.run(words, check=False).returncode != 0
            continue
        with working_folder() as folder:
            area = made(name, folder, more)
            warm(area)
            guard.folder = str(folder)
            faults += bool(fuzzed(area, guard, chosen.seconds / len(names), first).found)
        cases += guard.count
    print(f"{cases or 'guided'} cases from seed {first}, {faults} areas with faults")  # noqa: T201
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(run())
