"""Train runs through random kills, and compare each with the same run undisturbed.

    python scripts/soak.py --kills 50 --seed 3
    python scripts/soak.py --minutes 60 --steps 2000 --precision fp8_delayed

Each attempt is a fork of this process. SIGKILL ends it at a random moment, start-up and saves included. The next one
must resume from the newest sound checkpoint, with the losses of the undisturbed run and each step once in the metrics.
No process may stay behind for two seconds, and memory and open files stay flat. A run that reaches its end is followed
by another, until the kills or the minutes are used up. `make soak` runs it for an hour; exit code 1: a fault was found.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import psutil

import bridge.training.loop  # noqa: F401  imported once, for all attempts
from bridge.front.train import main_train
from bridge.runtime.audit.run_folder import RunFolder
from bridge.runtime.checkpoint.folder import get_step_folder, is_finished, list_iterations
from bridge.runtime.checkpoint.manifest import find_damage

ROOT = Path(__file__).resolve().parents[1]
RESUMED = re.compile(r"Resumed from step (\d+) of ")
Usage = tuple[float, int]
"""MiB of memory, and number of open files."""


@dataclass(kw_only=True)
class Run:
    """A run, its checkpoints, and how its attempts went."""

    folder: Path
    steps: int
    precision: str
    saves: bool = True
    begun: float | None = None
    """Seconds from the start of the last attempt to its first step, None for one without a step."""
    usage: list[Usage] = field(default_factory=list)
    """Usage of the last attempt, every half second from its tenth step on."""

    @property
    def saved(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "saved"

    @property
    def log(self) -> Path:
        """The output of the last attempt."""
        return self.folder / "output"

    @property
    def newest_sound(self) -> int:
        """The step of the newest checkpoint whose files are as they were written, 0 without one."""
        for number in list_iterations(self.saved):
            if find_damage(get_step_folder(self.saved, number)) is None:
                return number
        return 0

    @property
    def resumed_from(self) -> int | None:
        """The step that the last attempt resumed from, None for an attempt that was killed before."""
        if not self.log.is_file():
            return None
        match = RESUMED.search(self.log.read_text())
        if match is None:
            return None
        return int(match[1])

    def was_saving(self, since: float) -> bool:
        """Return whether the last attempt left a checkpoint unfinished."""
        for number in list_iterations(self.saved)[:1]:
            newest = get_step_folder(self.saved, number)
            return not is_finished(newest) and newest.stat().st_mtime >= since
        return False

    def losses(self) -> list[tuple[int, float]]:
        """Return (step, loss) of every record."""
        return [(record["step"], record["loss"]) for record in RunFolder(self.folder).read_metrics("train")]

    def attempt(self, seconds: float) -> tuple[int | None, list[str]]:
        """Start or resume the run, and kill it after some seconds; return its exit code and processes left behind."""
        words = ["model=gpt_tiny", "train=smoke", "train.eval_iters=0", f"train.train_iters={self.steps}"]
        words += [f"mixed_precision={self.precision}", f"hydra.run.dir={self.folder}"]
        words += ["logging.log_interval=1", "logging.tensorboard=false", "logging.progress=false"]
        if self.saves:
            words += [f"checkpoint.save={self.saved}", "checkpoint.save_interval=2"]
        if self.newest_sound:
            words.append(f"checkpoint.load={self.saved}")
        process = multiprocessing.get_context("fork").Process(target=_train, args=(words, self.log))
        began = time.monotonic()
        before = self.newest_sound
        self.usage, self.begun = [], None
        self.log.unlink(missing_ok=True)  # a kill may come before this attempt opens it
        process.start()
        while process.exitcode is None and time.monotonic() < began + seconds:
            pause = 0.05
            if self.begun:
                pause = 0.5
            process.join(min(pause, max(0.0, began + seconds - time.monotonic())))
            last = max((step for step, _ in self.losses()), default=0)
            if self.begun is None and last > before:
                self.begun = time.monotonic() - began
            if before + 10 <= last < self.steps and process.exitcode is None:
                seen = psutil.Process(process.pid)
                self.usage.append((seen.memory_info().rss / 2**20, seen.num_fds()))
        process.kill()
        process.join()
        ended = time.monotonic()
        left = _processes(process.pid)
        while left and time.monotonic() < ended + 2:  # `cc --version` of a start-up outlives it by milliseconds
            time.sleep(0.1)
            left = _processes(process.pid)
        return process.exitcode, left

    def is_flat(self) -> bool:
        """Return whether the second half of the last attempt has at most 10 MiB and 5 files more than its first."""
        if len(self.usage) < 40:
            return True  # twenty seconds say little
        middle = len(self.usage) // 2
        memory = [mib for mib, _ in self.usage]
        files = [count for _, count in self.usage]
        has_flat_memory = max(memory[middle:]) <= max(memory[:middle]) + 10
        return has_flat_memory and max(files[middle:]) <= max(files[:middle]) + 5


def _train(words: list[str], log: Path) -> NoReturn:
    """Train in this process, in a new session; the target of an attempt."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    main_train(words, config_path=ROOT / "conf")
    sys.exit(0)


def _processes(session: int) -> list[str]:
    """Return the command lines of the processes of a session."""
    commands = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session:
                commands.append(" ".join(process.cmdline()) or process.name())
    return commands


@dataclass(kw_only=True)
class Tally:
    """The kills of all runs, and the faults that they showed."""

    kills: int = 0
    in_saves: int = 0
    before_first_step: int = 0
    resumed: int = 0
    runs: int = 0
    steps: int = 0
    faults: list[str] = field(default_factory=list)

    def follow(self, run: Run, expected: list[tuple[int, float]], seconds: float) -> bool:
        """Make an attempt and compare it with the undisturbed run; return whether the run is over."""
        sound, since = run.newest_sound, time.time()
        code, left = run.attempt(seconds)
        self.kills += code == -signal.SIGKILL
        self.in_saves += run.was_saving(since)
        self.before_first_step += run.begun is None
        self.resumed += run.resumed_from is not None
        where = f"run {self.runs}, kill {self.kills}"
        if code not in (0, -signal.SIGKILL):
            self.faults.append(f"{where}: exit code {code}: {run.log.read_text()[-2000:]}")
        if left:
            self.faults.append(f"{where}: processes {left} stayed behind")
        if run.resumed_from not in (None, sound):
            self.faults.append(f"{where}: resumed from step {run.resumed_from}, and step {sound} is sound")
        losses = run.losses()
        if losses != expected[: len(losses)] or (code == 0 and len(losses) < len(expected)):
            self.faults.append(f"{where}: the losses are not those of the undisturbed run")
        if not run.is_flat():
            self.faults.append(f"{where}: memory or open files grew: {run.usage[:: len(run.usage) // 12]}")
        return code != -signal.SIGKILL


def main() -> int:
    """Read the command line and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10**9, help="end after so many kills")
    parser.add_argument("--minutes", type=float, default=60.0, help="end the kills after so many minutes (60)")
    parser.add_argument("--steps", type=int, default=200, help="steps of each run (200)")
    parser.add_argument("--precision", default="bf16_mixed", help="recipe (bf16_mixed)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills (0)")
    options = parser.parse_args()
    moments = random.Random(options.seed)  # noqa: S311  no secret
    tally, began = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        alone = Run(folder=Path(scratch) / "alone", steps=options.steps, precision=options.precision, saves=False)
        alone.folder.mkdir()
        code, _ = alone.attempt(3600)
        expected = alone.losses()
        if code or len(expected) < options.steps or alone.begun is None:
            sys.exit(alone.log.read_text()[-4000:])
        if not alone.is_flat():
            tally.faults.append(f"the undisturbed run: memory or open files grew: {alone.usage[::9]}")
        longest = 4 * alone.begun
        for tally.runs in itertools.count(1):
            run = Run(folder=Path(scratch) / str(tally.runs), steps=options.steps, precision=options.precision)
            run.folder.mkdir()
            is_over = is_last = False
            while not is_over:
                is_last = tally.kills >= options.kills or time.monotonic() - began > 60 * options.minutes
                seconds = 3600.0
                if not is_last:
                    seconds = moments.uniform(0, longest)
                is_over = tally.follow(run, expected, seconds)
            tally.steps += len(run.losses())
            shutil.rmtree(run.folder)
            if is_last or tally.faults:
                break
    print(
        f"{options.precision}, seed {options.seed}: {tally.kills} kills ({tally.in_saves} in a save, "
        f"{tally.before_first_step} before the first step), {tally.resumed} resumed, {tally.runs} runs, {tally.steps} "
        f"steps, {(time.monotonic() - began) / 60:.0f} minutes: {tally.faults or 'no fault'}"
    )
    if tally.faults:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
