"""Fuzzing: `python -m tests.fuzz --seconds 600`, or `make fuzz`. Whatever is read ends in a result or in our own error.

Each area draws cases with hypothesis until its share of the time is over. A case fails where an error is raised that is
no `BridgeError`, where the answer takes more than 5 s of CPU time, and where anything is started, connected to or
written outside the run's folder, which an audit hook of Python sees. Exit code 1: a case failed; hypothesis prints the
smallest.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from bridge.checkpoint.contents import Contents, Difference
from bridge.checkpoint.manifest import MANIFEST, Manifest, checksums, damage, outline
from bridge.checkpoint.pickles import METADATA, pickle_fault
from bridge.cli.main import main as command
from bridge.errors import BridgeError
from bridge.front.loader import load_run
from bridge.precision.groups import GROUPS
from bridge.registry.registry import REGISTRY
from tests.interop.test_fuzz import KEYS, MODULES, NAMES, SAMPLES, SPLICES, survives

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 5.0
ROUND = 200
"""Cases that hypothesis draws from one seed."""
STARTS = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "socket.connect")
WRITES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod")
FIELDS = sorted({name for names in GROUPS.values() for name in names})
WORDS = [
    *FIELDS,
    *KEYS,
    "num_layers",
    "hidden_size",
    "train",
    "data",
    "checkpoint",
    "resume",
    "silence",
    "target",
    "until",
]
WORDS += [
    "recipe",
    "recipes_from",
    "precision_schedule",
    "defaults",
    "_target_",
    "_recipe_",
    "hydra",
    "modules",
    "match",
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=5),
    max_leaves=20,
)
YAML_SPLICES = [*SPLICES, b"!!set {}", b"- &a [*a]", b"{a: &a 1, b: *a}", b"\xe2\x80\xa8", b"9" * 400, b"${a}", b"???"]
PICKLE_SPLICES = [
    b"cposix\nsystem\n", b"\x8c\x05posix\x8c\x06system\x93", b"(S'touch ran'\ntR", b"R", b"b", b"0", b".", b"}", b"]",
    b"(", b"t", b"N", b"\x88", b"ctorch\nSize\n", b"c__builtin__\neval\n", b"\x94", b"h\x00", b"\x81", b"\x92", b"s",
    b"cbuiltins\ngetattr\n", b"\x80\x05", b"J\xff\xff\xff\xff", b"\x8a\xff", b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f",
]  # fmt: skip


class LateError(BaseException):
    """A case that took too long; not an `Exception`, which a reader of foreign files may catch."""


class Guard:
    """Notes what a case starts or writes outside a folder, through Python's audit events."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.is_on = False
        self.seen: list[str] = []
        sys.addaudithook(self.hear)

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

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self.seen.clear()
        self.is_on = True
        signal.setitimer(signal.ITIMER_PROF, LIMIT_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self.is_on = False
        assert not self.seen, self.seen


@dataclass(frozen=True)
class Area:
    """A kind of input: how its cases are drawn, and the code that reads one."""

    name: str
    cases: st.SearchStrategy[Any]
    read: Callable[[Any], object]


@st.composite
def mutated(draw: st.DrawFn, texts: list[bytes], splices: list[bytes]) -> bytes:
    """Return one of some texts with splices in it, and some bytes less."""
    text = draw(st.sampled_from(texts))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(splices)) + text[at + draw(st.sampled_from([0, 0, 1, 7])) :]
    return text


def of_yaml(content: object) -> bytes:
    return yaml.safe_dump(content, sort_keys=False).encode()


def quietly(*words: str) -> None:
    """Run a command in this process; its own exits are answers."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            command(list(words))
        except SystemExit as ended:
            assert ended.code in (0, 1, 2), ended.code
    assert "Traceback" not in said.getvalue()


def areas(folder: Path) -> list[Area]:
    """Return all areas; `folder` is the place of the files."""
    shown = [path.read_bytes() for path in sorted((ROOT / "docs" / "showcase").glob("*.yaml"))]
    recipes = [of_yaml({"mixed_precision": REGISTRY.get(name).to_dict()}) for name in REGISTRY.names()]
    file, tree = folder / "run.yaml", folder / "tree" / "mixed_precision" / "house.yaml"
    tree.parent.mkdir(parents=True)
    plain = folder / "plain.yaml"
    plain.write_bytes(shown[0])
    configs = mutated(shown, YAML_SPLICES) | st.builds(of_yaml, st.dictionaries(st.sampled_from(WORDS), VALUES))
    values = st.sampled_from(["1", "true", "null", "[1,2]", "{a:1}", "'x'", "${a}", "9" * 5000, "e4m3", "", "a,b", "["])
    words = st.builds(
        "{}{}{}{}".format,
        st.sampled_from(["", "", "", "+", "++", "~"]),
        st.sampled_from([*WORDS, "model", "optimizer.lr", "model.fp8", "mixed_precision.fp8_recipe", "hydra.run.dir"]),
        st.sampled_from(["=", "=", ".x=", "@y=", ""]),
        values | st.text(max_size=8),
    )
    checkpoint, sound = folder / "checkpoint", folder / "sound"
    parts = [path.name for path in sound.iterdir() if path.suffix in (".json", ".pt") or path.name == METADATA]
    damaged = st.sampled_from(parts).flatmap(
        lambda name: st.tuples(st.just(name), mutated([(sound / name).read_bytes()], [*PICKLE_SPLICES, *SPLICES]))
    )
    pickled = st.builds(
        lambda pieces: pickle.dumps({"a": 1})[:-1] + b"".join(pieces),
        st.lists(st.sampled_from(PICKLE_SPLICES), max_size=12),
    )

    def read_config(case: tuple[bytes, str]) -> None:
        file.write_bytes(case[0])
        quietly(case[1], "--config", str(file))

    def read_recipe(case: bytes) -> None:
        tree.write_bytes(case)
        load_run(["mixed_precision=house", "model=gpt_tiny"], config_dir=tree.parents[1])

    def read_checkpoint(case: tuple[str, bytes]) -> None:
        shutil.copytree(sound, checkpoint, dirs_exist_ok=True)
        name, data = case
        (checkpoint / name).write_bytes(data)
        damage(checkpoint)
        if name != MANIFEST:
            sizes = outline(checkpoint)
            Manifest(sizes=sizes, checksums=checksums(checkpoint, sizes), run={"settings": {}}).write(checkpoint)
            assert damage(checkpoint) is None
        pickle_fault(checkpoint)
        contents = Contents.read(checkpoint)
        json.dumps([contents.to_dict(), Difference.of(contents, contents).to_dict()])
        quietly("checkpoint", "inspect", str(checkpoint))

    return [
        Area(
            "foreign files",
            st.tuples(
                mutated([path.read_bytes() for path in SAMPLES], SPLICES) | st.binary(max_size=300),
                st.sampled_from([*NAMES, *(path.name for path in SAMPLES)]),
                st.sampled_from([None, *MODULES]),
            ),
            lambda case: survives(*case),
        ),
        Area(
            "configs", st.tuples(configs, st.sampled_from(["check", "plan", "memory", "align", "modules"])), read_config
        ),
        Area("recipe files", mutated(recipes, YAML_SPLICES) | st.builds(of_yaml, VALUES), read_recipe),
        Area("overrides of a file", st.lists(words, max_size=4), lambda case: load_run(case, config_file=plain)),
        Area("overrides of a tree", st.lists(words, max_size=4), lambda case: load_run(["model=gpt_tiny", *case])),
        Area("checkpoints", damaged | st.tuples(st.just(METADATA), pickled), read_checkpoint),
    ]


def examine(area: Area, guard: Guard, case: object) -> float:
    """Return the CPU time that a case took; whatever is no result and no error of ours is raised."""
    began = time.process_time()
    with guard.watching(), contextlib.suppress(BridgeError):
        area.read(case)
    taken = time.process_time() - began
    assert taken < LIMIT_SECONDS, f"{taken:.1f} s"
    return taken


def fuzz(area: Area, guard: Guard, seconds: float, first: int) -> tuple[int, float, str]:
    """Return the cases that were read, the longest CPU time of one, and the fault that was found, if any."""
    count, longest = 0, 0.0
    ends = time.monotonic() + seconds

    def one(case: Any) -> None:
        nonlocal count, longest
        if time.monotonic() > ends:
            return
        count += 1
        longest = max(longest, examine(area, guard, case))

    number = first
    drawn = settings(
        max_examples=ROUND,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    while time.monotonic() < ends:
        try:
            seed(number)(drawn(given(area.cases)(one)))()
        except (Exception, LateError):  # noqa: BLE001  the fault that the case found
            return count, longest, traceback.format_exc(limit=-12)
        number += 1
    return count, longest, ""


def late(_number: int, _frame: object) -> None:
    raise LateError


def prepare(folder: Path) -> None:
    """Make a checkpoint for the areas, and end a case that takes too long."""
    from bridge.training.loop import pretrain  # heavy
    from tests.training.loop_tiny import tiny

    sys.dont_write_bytecode = True
    signal.signal(signal.SIGPROF, late)
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        pretrain(tiny(train={"train_iters": 1, "eval_iters": 0}, save=str(folder / "saved")), run_dir=folder / "run")
    shutil.copytree(folder / "saved" / "iter_0000001", folder / "sound")


def run() -> int:
    """Fuzz every area for an equal share of the time, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="for all areas together (default: 60)")
    parser.add_argument("--seed", type=int, default=None, help="the first seed (default: another one each time)")
    parser.add_argument("--only", default="", help="areas whose name has this text")
    chosen = parser.parse_args()
    first = random.randrange(2**31) if chosen.seed is None else chosen.seed  # noqa: S311  no secret
    faults = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(os.path.realpath(place))
        prepare(folder)
        guard = Guard(folder)
        known = [area for area in areas(folder) if chosen.only in area.name]
        total = 0
        for area in known:
            count, longest, fault = fuzz(area, guard, chosen.seconds / len(known), first)
            total += count
            faults += bool(fault)
            print(f"{area.name}: {count} cases, longest {longest:.2f} s{', FAILED' if fault else ''}", flush=True)  # noqa: T201
            if fault:
                print(fault, flush=True)  # noqa: T201
        print(f"{total} cases from seed {first} on, {faults} faults")  # noqa: T201
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(run())
