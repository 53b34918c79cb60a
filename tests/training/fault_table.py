"""The table fault x moment x outcome: each fault is injected into a real run of the command, which is then resumed.

    python -m tests.training.fault_table                                  print the table
    python -m tests.training.fault_table --write docs/explain/faults.md   `make faults`

Every cell is read from the run: its exit code, the lines that an undisturbed run does not print, the newest checkpoint
whose files are whole, the step that the next run goes on from, and whether the losses are those of the undisturbed run.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pickle
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async

from bridge.front.train import main_train
from bridge.runtime.checkpoint.folder import LATEST_FILE, get_step_folder, list_resumable_iterations
from bridge.runtime.checkpoint.lock import LOCK_FILE, lock_folder
from bridge.runtime.checkpoint.manifest import MANIFEST_FILE, Manifest, compute_checksums, find_damage, list_file_sizes
from bridge.runtime.checkpoint.pickles import find_pickle_fault
from bridge.runtime.megatron.checkpoint import saving
from bridge.runtime.megatron.optimizer import list_torch_optimizers
from bridge.runtime.megatron.trainer import Trainer
from bridge.training import loop
from tests import warm
from tests.training.loop_tiny import ROOT, disturb, losses, records

STEPS = 6
HALF = 4
"""The newest checkpoint of the run that damaged files are taken from; it was killed in the step after."""
WORDS = (
    "model=gpt_tiny",
    "train=smoke",
    f"train.train_iters={STEPS}",
    "train.eval_iters=0",
    "train.lr_warmup_iters=0",
    "logging.log_interval=1",
    "logging.tensorboard=false",
    "logging.progress=false",
    "checkpoint.save=saved",
    "checkpoint.save_interval=2",
    "hydra.run.dir=run",
    "data.cache_dir=cache",
)
NAN, INF = float("nan"), float("inf")
SHOWN = 3
"""Lines of a run that a cell shows."""
BEGIN, END = "<!-- the table of tests/training/fault_table.py -->", "<!-- end of the table -->"
NUMBERS = re.compile(r"\d+\.\d+|\b[0-9a-f]{16,}\b|\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d(,\d+)?")
UNTOLD = re.compile(r"^step +\d+/\d+ |^Checkpoint: |\s{3}")
"""Lines of every run: its steps, its checkpoints and the closing table."""
LOGGED = re.compile(r"^\[[^\]]*\]\[(?P<name>[^\]]*)\]\[?(?P<level>\w*)\]? ?-? ?")


@dataclass(frozen=True)
class Fault:
    """A fault and the moment at which it comes."""

    name: str
    moment: str
    _: KW_ONLY
    inject: Callable[[], None] = lambda: None
    """Called in a process of the run before it begins."""
    ranks: tuple[int, ...] = (0,)
    """The ranks that have it."""
    processes: int = 1
    prepare: Callable[[Path], object] | None = None
    """Damages the folder of an undisturbed run, from whose checkpoints the run then resumes."""
    words: tuple[str, ...] = ()
    held: str | None = None
    """A folder whose lock another run holds."""
    repair: Callable[[Path], None] | None = None
    """Takes the fault away before the next run, where none can go on with it."""


def wrapped(owner: Any, name: str, number: int, act: Callable[..., Any]) -> None:
    """Call `act` before the call of this number, counted from 1, of a function; it may return other arguments."""
    function, calls = getattr(owner, name), iter(range(1, 10**9))

    @functools.wraps(function)  # Megatron looks at the parameters of its writer
    def with_fault(*arguments: Any, **named: Any) -> Any:
        if next(calls) == number:
            arguments = act(*arguments) or arguments
        return function(*arguments, **named)

    setattr(owner, name, with_fault)


def in_step(act: Callable[[Any], None]) -> Callable[[], None]:
    """Return an injection that acts at the beginning of step 3."""
    return lambda: wrapped(Trainer, "forward_backward", 3, lambda trainer, *_: act(trainer))


def in_save(act: Callable[[], None], place: str) -> Callable[[], None]:
    """Return an injection that acts in the save of step 4: before the files, within one, or before the manifest."""
    if place == "while a file is written":
        writing = functools.partial(wrapped, filesystem_async, "_write_item", 5, lambda *_: act())
        return lambda: wrapped(saving, "_make_checkpoint_folder", 2, lambda *_: writing())
    owner, name = {"at its begin": (saving, "_make_room"), "before the manifest": (Manifest, "write")}[place]
    return lambda: wrapped(owner, name, 2, lambda *_: act())


def at_start(act: Callable[[], None]) -> Callable[[], None]:
    """Return an injection that acts before the model is built."""
    return lambda: wrapped(loop, "build_run", 1, lambda *_: act())


def send(number: int) -> Callable[..., None]:
    return lambda *_: os.kill(os.getpid(), number)


def twice(number: int) -> Callable[..., None]:
    """Return an act that sends a signal, and sends it again in the same step, after the first one was handled."""

    def act(*_: object) -> None:
        send(number)()
        time.sleep(0.05)
        send(number)()

    return act


_pipes: list[tuple[int, int, int]] = []
"""Process that copies the output of this one, and the first places of stdout and stderr."""


def full_disk(*_: object) -> None:
    """Let no file grow from now on; the output of the run, which goes to files here, goes through another process."""
    reader, writer = os.pipe()
    places = os.dup(1), os.dup(2)
    child = os.fork()
    if child == 0:
        os.close(writer)
        while data := os.read(reader, 65536):
            os.write(1, data)
        os._exit(0)
    os.close(reader)
    for number in (1, 2):
        os.dup2(writer, number)
    os.close(writer)
    _pipes.append((child, *places))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def make_room() -> None:
    """End what `full_disk` began."""
    for child, *places in _pipes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        sys.stdout.flush()
        for number, place in enumerate(places, start=1):
            os.dup2(place, number)
        os.waitpid(child, 0)


def weight(value: float) -> Callable[[Any], None]:
    def write(trainer: Any) -> None:
        for inner in list_torch_optimizers(trainer.optimizer):
            inner.param_groups[0]["params"][0].data.view(-1)[0] = value
        next(iter(trainer.model[0].parameters())).data.view(-1)[0] = value

    return write


def bad_data() -> None:
    """Put NaN into the loss mask of a batch of step 3, the one tensor of a batch that holds no integers."""

    def spoiled(batches: Any) -> Any:
        for batch in batches:
            batch["loss_mask"][0, 0] = NAN
            yield batch

    wrapped(Trainer, "forward_backward", 3, lambda trainer, batches: (trainer, spoiled(batches)))


def gradient(value: float) -> Callable[[], None]:
    def fill(trainer: Any) -> None:
        coming = iter((True,))  # the gradient of step 3 alone
        parameter = next(iter(trainer.model[0].parameters()))
        parameter.register_hook(lambda one: one.fill_(value) if next(coming, False) else one)

    return in_step(fill)


def clock(seconds: float) -> Callable[[Any], None]:
    def jump(_trainer: object) -> None:
        now, now_ns = time.time, time.time_ns
        time.time = lambda: now() + seconds
        time.time_ns = lambda: now_ns() + int(seconds * 1e9)

    return jump


def newest(folder: Path) -> Path:
    return get_step_folder(folder / "saved", HALF)


def torn(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 3 // 5)


def tear_line(folder: Path) -> None:
    with (folder / "run" / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "train", "st')


def tensors(folder: Path) -> Path:
    return max(newest(folder).glob("*.distcp"), key=lambda path: path.stat().st_size)


def flip(folder: Path) -> None:
    data = bytearray(tensors(folder).read_bytes())
    data[len(data) // 2] ^= 1
    tensors(folder).write_bytes(data)


def tear_run_folder(folder: Path) -> None:
    for path in (folder / "run").rglob("*"):
        if path.is_file() and path.name != "metrics.jsonl":
            torn(path)
    tear_line(folder)


def tear_indices(folder: Path) -> None:
    for path in (folder / "cache" / "indices").glob("*.npy"):
        torn(path)


class Evil:
    """A pickle of this makes a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


def forge_indices(folder: Path) -> None:
    for path in (folder / "cache" / "indices").glob("*.npy"):
        path.write_bytes(pickle.dumps(Evil()))


def from_the_future(folder: Path) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (4e9, 4e9))


def forge(folder: Path) -> None:
    """Put code into a checkpoint, and write a manifest that agrees with it."""
    (newest(folder) / ".metadata").write_bytes(pickle.dumps(Evil()))
    rewrite(newest(folder))


def rewrite(checkpoint: Path, *, checksum: bool = True, run: dict[str, Any] | None = None) -> None:
    """Write a manifest over the files of a checkpoint as they are now."""
    sizes = list_file_sizes(checkpoint)
    sums = compute_checksums(checkpoint, sizes) if checksum else {}
    Manifest(sizes=sizes, checksums=sums, run=run or Manifest.read(checkpoint).run).write(checkpoint)


def swap(folder: Path) -> None:
    shutil.rmtree(newest(folder))
    shutil.copytree(get_step_folder(folder / "saved", 2), newest(folder))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def pointer_folder(folder: Path) -> None:
    (folder / "saved" / LATEST_FILE).unlink(missing_ok=True)
    (folder / "saved" / LATEST_FILE).mkdir()


def tear_text(suffix: str) -> Callable[[Path], None]:
    return lambda folder: torn(next((folder / "cache").glob(f"bytes-*{suffix}")))


def write(name: str, text: str) -> Callable[[Path], object]:
    """Return a damage: a file in the folder of the checkpoints that holds this text."""
    return lambda folder: (folder / "saved" / name).write_text(text)


KILL, TERM = signal.SIGKILL, signal.SIGTERM
PLACES = ("at its begin", "while a file is written", "before the manifest")
OF_STEP_3: dict[str, Callable[[], None]] = {
    "NaN in a gradient": gradient(NAN),
    "Inf in a gradient": gradient(INF),
    "NaN in a weight": in_step(weight(NAN)),
    "Inf in a weight": in_step(weight(INF)),
    "NaN in the data": bad_data,
    "SIGTERM and torchrun's copy of it": in_step(twice(TERM)),
    "Ctrl-C": in_step(send(signal.SIGINT)),
    "the clock jumps by a day": in_step(clock(86400)),
    "the clock jumps back by a day": in_step(clock(-86400)),
}
OF_ONE_RANK: dict[str, Callable[[], None]] = {
    "NaN in a gradient of one of two ranks": gradient(NAN),
    "NaN in a weight of one of two ranks": in_step(weight(NAN)),
    "NaN in the data of one of two ranks": bad_data,
    "SIGTERM at one of two ranks": in_step(send(TERM)),
    "a rank of two is killed": lambda: disturb("die", 3),
    "a rank of two has an error": lambda: disturb("crash", 3),
    "a rank of two stalls": lambda: disturb("stall", 3),
}
OF_PLACES: dict[str, Callable[..., None]] = {"kill -9": send(KILL), "SIGTERM": send(TERM), "disk full": full_disk}
AT_START: dict[str, dict[str, Any]] = {
    "checkpoint.save cannot be written to": {"words": ("checkpoint.save=file/saved",)},
    "the run folder cannot be written to": {"words": ("logging.run_dir=file/run",)},
    "the cache of the data cannot be written to": {"words": ("data.cache_dir=file/cache",)},
    "another run saves to the same folder": {"held": "saved"},
    "another run has the same run folder": {"held": "run"},
}
DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit in a checkpoint": flip,
    "a truncated file of a checkpoint": lambda folder: torn(tensors(folder)),
    "a missing file of a checkpoint": lambda folder: tensors(folder).unlink(),
    "an emptied .metadata": lambda folder: os.truncate(newest(folder) / ".metadata", 0),
    "a torn manifest.json": lambda folder: torn(newest(folder) / MANIFEST_FILE),
    "code in a checkpoint, and a manifest that agrees": forge,
    "a manifest without checksums": lambda folder: rewrite(newest(folder), checksum=False),
    "a manifest with a list of settings": lambda folder: rewrite(newest(folder), run={"settings": ["a"]}),
    "a manifest that is a pipe": lambda folder: pipe(newest(folder) / MANIFEST_FILE),
    "the checkpoint of step 2 in the place of that of step 4": swap,
    f"{LATEST_FILE} with an older step": write(LATEST_FILE, "2\n"),
    f"{LATEST_FILE} that is a folder": pointer_folder,
    f"a torn {LATEST_FILE}": write(LATEST_FILE, ""),
    "a torn lock": write(LOCK_FILE, '{"host": "x'),
    "a lock of 4,096 brackets": write(LOCK_FILE, "[" * 4096),
    "a torn last line of metrics.jsonl": tear_line,
    "every file of the run folder torn": tear_run_folder,
    "the tokenised text torn": tear_text(".bin"),
    "the index of the tokenised text torn": tear_text(".idx"),
    "the sample indices torn": tear_indices,
    "the sample indices are pickles with code": forge_indices,
    "all files are from the future": from_the_future,
}
REPAIRS: dict[str, Callable[[Path], None]] = {
    f"{LATEST_FILE} that is a folder": lambda folder: (folder / "saved" / LATEST_FILE).rmdir()
}
SLOW: dict[str, tuple[str, ...]] = {"a rank of two stalls": ("train.distributed_timeout_minutes=0.25",)}
TWO = ("train.micro_batch_size=2",)
FAULTS = (
    *(Fault(name, "step 3", inject=inject) for name, inject in OF_STEP_3.items()),
    *(
        Fault(name, "step 3", inject=inject, ranks=(1,), processes=2, words=SLOW.get(name, ()))
        for name, inject in OF_ONE_RANK.items()
    ),
    Fault("NaN in a gradient of both ranks", "step 3", inject=gradient(NAN), ranks=(0, 1), processes=2),
    *(
        fault
        for name, act in OF_PLACES.items()
        for fault in (
            Fault(name, "start-up", inject=at_start(act)),
            Fault(name, "step 3", inject=in_step(act)),
            *(Fault(name, f"save of step 4, {place}", inject=in_save(act, place)) for place in PLACES),
        )
    ),
    *(Fault(name, "start-up", **given) for name, given in AT_START.items()),
    *(Fault(name, "resume", prepare=damage, repair=REPAIRS.get(name)) for name, damage in DAMAGES.items()),
)


BASE = Fault("base", "step 5", inject=lambda: wrapped(Trainer, "forward_backward", HALF + 1, send(KILL)))
KNOWN = (BASE, *FAULTS)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The observed result of a fault."""

    name: str
    moment: str
    codes: tuple[int, ...]
    """Exit code of each rank; a negative one is a signal."""
    said: tuple[str, ...]
    """Lines that an undisturbed run does not print."""
    kept: int
    """The newest sound checkpoint that the fault left."""
    resumed: int | None
    """The step that the run after the fault resumed from; None: the run took all its steps itself."""
    skipped: tuple[int, ...]
    differing: int
    """Steps whose loss is not that of the undisturbed run, the next run's included."""
    missing: int
    """Steps without a record, the next run's included."""
    has_traceback: bool

    @property
    def is_silent(self) -> bool:
        """Whether the run ended as a success, with other losses and without a word."""
        return not any(self.codes) and bool(self.differing) and not self.said and not self.skipped

    @property
    def outcome(self) -> str:
        """The outcome as the text of a cell."""
        codes = ", ".join(map(str, dict.fromkeys(self.codes)))
        facts = [f"exit code {codes}"]
        facts += [f"step {', '.join(map(str, self.skipped))} skipped"] if self.skipped else []
        facts += [f"resumed from step {self.resumed}"] if self.resumed is not None else []
        facts += [] if self.differing else ["losses of the undisturbed run"]
        return "; ".join(facts)

    @property
    def printed(self) -> str:
        """The first lines as the text of a cell."""
        more = [f"and {len(self.said) - SHOWN} more"] if len(self.said) > SHOWN else []
        return "<br>".join([*self.said[:SHOWN], *more])


class Bench:
    """Runs with and without faults, in folders of one place."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.expected: dict[int, list[float]] = {}
        self.usual: dict[int, set[str]] = {}
        for processes in (1, 2):
            folder = place / f"undisturbed-{processes}"
            folder.mkdir()
            done = self.run(folder, None, processes)
            assert not any(one.returncode for one in done), done[0].stderr
            self.expected[processes] = losses(folder / "run")
            self.usual[processes] = {_masked(line) for one in done for line in self.lines(one, folder)}
        (place / "base").mkdir()
        self.run(place / "base", BASE, 1)
        again = Path(shutil.copytree(place / "base", place / "resumed"))
        self.usual[1] |= {_masked(line) for one in self.run(again, None, 1) for line in self.lines(one, again)}

    def run(self, folder: Path, fault: Fault | None, processes: int, *words: str) -> list[warm.Done]:
        """Run the command in a folder, with a fault or without; it resumes where there is a sound checkpoint."""
        number = str(KNOWN.index(fault)) if fault is not None else "none"
        shared = self.place / "undisturbed-1" / "cache"
        if shared.is_dir() and not (folder / "cache").exists():
            shutil.copytree(shared, folder / "cache")
        given = [*WORDS, *(TWO if processes == 2 else ()), *words]
        given += ["checkpoint.load=saved"] if sound(folder) else []
        command = ["python", "-W", "ignore", "-m", "tests.training.fault_table", "--run", str(folder), number, *given]
        if processes == 1:
            return [warm.run(command, cwd=ROOT)]
        return warm.launch(command, processes=processes, cwd=ROOT)

    def observe(self, fault: Fault) -> Row:
        """Inject a fault, look at the end of the run, and let the next run go on."""
        folder = self.place / str(FAULTS.index(fault))
        if fault.prepare is not None:
            shutil.copytree(self.place / "base", folder)
            fault.prepare(folder)
        folder.mkdir(exist_ok=True)
        (folder / "file").touch()
        before = sound(folder)
        with ExitStack() as stack:
            if fault.held is not None:
                stack.enter_context(lock_folder(folder / fault.held))
            done = self.run(folder, fault, fault.processes, *fault.words)
        steps = records(folder / "run") if (folder / "run" / "metrics.jsonl").is_file() else []
        sound_ranks = [one for rank, one in enumerate(done) if rank not in fault.ranks] or done
        printed = [line for one in sound_ranks for line in self.lines(one, folder)]
        kept, resumed = (before, _resumed(done[0])) if fault.prepare is not None else (sound(folder), None)
        if fault.repair is not None:
            fault.repair(folder)
        if any(one.returncode for one in done) or len(steps) < STEPS:
            after = self.run(folder, None, fault.processes)[0]
            assert after.returncode == 0, after.stdout + after.stderr
            resumed = _resumed(after)
        final = losses(folder / "run")
        return Row(
            name=fault.name,
            moment=fault.moment,
            codes=tuple(one.returncode for one in done),
            said=tuple(dict.fromkeys(line for line in printed if _masked(line) not in self.usual[fault.processes])),
            kept=kept,
            resumed=resumed,
            skipped=tuple(step["step"] for step in steps if step["skipped"]),
            differing=sum(own != one for own, one in zip(final, self.expected[fault.processes], strict=False)),
            missing=STEPS - len(final),
            has_traceback=any("Traceback" in one.stdout + one.stderr for one in sound_ranks),
        )

    def lines(self, done: warm.Done, folder: Path) -> list[str]:
        """Return what a process of a run printed, without times, steps, and names of this machine."""
        found = []
        for line in (done.stdout + done.stderr).splitlines():
            text = LOGGED.sub("", line).replace(str(folder), "FOLDER").replace(socket.gethostname(), "HOST").strip()
            text = re.sub(r"process \d+", "process PID", text)
            if text and not UNTOLD.search(text):
                found.append(NUMBERS.sub("*", text))
        return found


def _resumed(done: warm.Done) -> int:
    found = re.search(r"Resumed from step (\d+) of", done.stdout)
    return int(found[1]) if found is not None else 0


def _masked(line: str) -> str:
    return re.sub(r"\d[\d.,e+-]*", "*", line)


def sound(folder: Path) -> int:
    """Return the step of the newest checkpoint that a run may resume from; 0: there is none."""
    saved = folder / "saved"
    return next((one for one in list_resumable_iterations(saved) if _counts(get_step_folder(saved, one), one)), 0)


def _counts(checkpoint: Path, number: int) -> bool:
    if (find_damage(checkpoint) or find_pickle_fault(checkpoint)) is not None:
        return False
    manifest = Manifest.read(checkpoint)
    return bool(manifest.checksums) and manifest.run.get("iteration", number) == number


def table(rows: list[Row]) -> str:
    """Return the table in Markdown, with its totals."""
    lost = sum(row.resumed is not None and row.resumed != row.kept for row in rows) + sum(row.missing for row in rows)
    silent, tracebacks = (sum(getattr(row, name) for row in rows) for name in ("is_silent", "has_traceback"))
    totals = (
        f"{len(rows)} faults: {lost} steps lost beyond the last checkpoint, {silent} silent continuations, "
        f"{tracebacks} tracebacks."
    )
    lines = [f"| {row.name} | {row.moment} | {row.outcome} | {row.printed} |" for row in rows]
    return "\n".join([totals, "", "| fault | moment | outcome | printed |", "|---|---|---|---|", *lines])


def inject(folder: str, number: str, *words: str) -> None:
    """Be a process of a run."""
    os.chdir(folder)
    if number != "none" and int(os.environ.get("RANK", "0")) in KNOWN[int(number)].ranks:
        KNOWN[int(number)].inject()
    try:
        main_train(words, config_path=ROOT / "conf")
    finally:
        make_room()


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="faults whose name has this text")
    parser.add_argument("--rows", type=Path, help="file of rows that need not be made again, and that gets those made")
    parser.add_argument("--write", type=Path, help="Markdown file that gets the table")
    given = parser.parse_args()
    if given.run:
        inject(*given.run)
        return 0
    known = given.rows.read_text().splitlines() if given.rows is not None and given.rows.is_file() else []
    rows = [Row(**json.loads(line)) for line in known]
    made = {(row.name, row.moment) for row in rows}
    asked = [one for one in FAULTS if given.only in one.name and (one.name, one.moment) not in made]
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(Path(place)) if asked else None
        for fault in asked:
            assert bench is not None
            rows.append(bench.observe(fault))
            if given.rows is not None:
                with given.rows.open("a") as stream:
                    stream.write(f"{json.dumps(asdict(rows[-1]))}\n")
    order = [(fault.name, fault.moment) for fault in FAULTS]
    rows.sort(key=lambda row: order.index((row.name, row.moment)))
    text = table(rows)
    if given.write is None:
        print(text)  # noqa: T201
    else:
        before, _, rest = given.write.read_text().partition(BEGIN)
        given.write.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
