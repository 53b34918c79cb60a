"""Train one run through random kills, and compare it with the same run undisturbed.

    python scripts/soak.py --kills 200
    python scripts/soak.py --minutes 60 --precision fp8_delayed

Each attempt resumes from the newest checkpoint and is ended by SIGKILL at a random moment, start-up and saves included.
The losses of all steps must be those of the undisturbed run, the metrics have each step once, no process stays behind,
and memory and open files stay flat. `make soak` runs it for an hour; exit code 1 where something differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
Usage = tuple[float, int]
"""MiB of memory and number of open files."""


def command(run_dir: Path, *, steps: int, precision: str, saved: Path | None) -> list[str]:
    """Return the words of the run."""
    words = [sys.executable, str(ROOT / "scripts" / "train.py"), "model=gpt_tiny", "train=smoke"]
    words += [f"mixed_precision={precision}", f"train.train_iters={steps}", "train.eval_iters=0"]
    words += [f"logging.run_dir={run_dir}", f"hydra.run.dir={run_dir}", "logging.log_interval=1"]
    words += ["logging.tensorboard=false"]
    if saved is not None:
        words += [f"checkpoint.save={saved}", "checkpoint.save_interval=5"]
        words += [f"checkpoint.load={saved}"] if finished(saved) else []
    return words


def finished(saved: Path) -> list[Path]:
    """Return the finished checkpoints of a folder."""
    return sorted(saved.glob("iter_*/manifest.json"))


def attempt(
    words: list[str], seconds: float | None, run_dir: Path, log: Path
) -> tuple[int, list[Usage], list[psutil.Process]]:
    """Run a command, and kill it after some seconds.

    Returns:
        Its exit code, its memory and open files every half second from its tenth step on, and the processes that it
        left behind.
    """
    with log.open("a") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
    usage: list[Usage] = []
    family: set[psutil.Process] = set()
    before = len(losses(run_dir))
    ends = time.monotonic() + (seconds if seconds is not None else 3600)
    while process.poll() is None and time.monotonic() < ends:
        try:
            seen = psutil.Process(process.pid)
            if len(losses(run_dir)) >= before + 10:
                usage.append((seen.memory_info().rss / 2**20, seen.num_fds()))
            family |= set(seen.children(recursive=True))
        except psutil.NoSuchProcess:
            break
        time.sleep(min(0.5, max(0.0, ends - time.monotonic())))
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    code = process.wait()
    _, left = psutil.wait_procs(list(family), timeout=5)
    return code, usage, left


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """Return (step, loss) of every record of a run."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be in the making
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "train"]


def is_flat(usage: list[Usage]) -> bool:
    """Return whether the second half of an attempt has at most 10 MiB and 5 open files more than its first half."""
    if len(usage) < 20:
        return True  # ten seconds say little
    early, late = usage[: len(usage) // 2], usage[len(usage) // 2 :]
    return max(late)[0] <= max(early)[0] + 10 and max(f for _, f in late) <= max(f for _, f in early) + 5


def main() -> int:
    """Read the command line and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10**9, help="end after so many kills")
    parser.add_argument("--minutes", type=float, default=60.0, help="end the kills after so many minutes (60)")
    parser.add_argument("--steps", type=int, default=2000, help="steps of the run (2000)")
    parser.add_argument("--precision", default="bf16_mixed", help="recipe (bf16_mixed)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills (0)")
    given = parser.parse_args()
    moments = random.Random(given.seed)  # noqa: S311  no secret
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        alone, disturbed, saved = folder / "alone", folder / "disturbed", folder / "saved"
        began = time.monotonic()
        code, usage, _ = attempt(
            command(alone, steps=given.steps, precision=given.precision, saved=None), None, alone, folder / "log"
        )
        if code:
            sys.exit((folder / "log").read_text()[-4000:])
        faults += [] if is_flat(usage) else ["the undisturbed run: memory or open files grew"]
        longest = max(10.0, (time.monotonic() - began) / 4)
        began, kills, code = time.monotonic(), 0, -1
        while code:
            stops = kills >= given.kills or time.monotonic() - began > 60 * given.minutes
            words = command(disturbed, steps=given.steps, precision=given.precision, saved=saved)
            code, usage, left = attempt(
                words, None if stops else moments.uniform(1, longest), disturbed, folder / "log"
            )
            kills += code == -signal.SIGKILL
            faults += [f"kill {kills}: process {one.pid} stayed behind" for one in left]
            faults += [] if is_flat(usage) else [f"attempt {kills}: memory or open files grew"]
            if code not in (0, -signal.SIGKILL):
                sys.exit(f"After {kills} kills an attempt ended with {code}:\n{(folder / 'log').read_text()[-4000:]}")
        expected, found = losses(alone), losses(disturbed)
        if found != expected:
            step = next((one for one, other in zip(expected, found, strict=False) if one != other), "the end")
            faults.append(f"the losses differ from the undisturbed run's, first at {step}")
        minutes = (time.monotonic() - began) / 60
    print(f"{kills} kills in {minutes:.0f} minutes, {len(found)} steps in {given.precision}: {faults or 'no fault'}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
