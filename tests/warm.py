"""Commands of the project, run in forks of one process that has imported torch and Megatron Core already.

`run` takes the words of a command and answers as `subprocess.run` does. The first call starts the process; each command
is a fork of it, with its own folder, environment and output, and sees neither this test process nor the other commands.
A test of a fresh interpreter (what it imports, how long that takes) uses `subprocess` instead.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["launch", "ranks_of_a_job", "run"]

ROOT = Path(__file__).resolve().parents[1]
COMMAND = Path(sys.executable).with_name("precision-bridge")
LIMIT_SECONDS = 1800
"""A command that takes longer hangs: no neighbour on the machine makes one so slow."""

IMPORTED = (
    "bridge.front.compare",
    "bridge.training.loop",
    "hydra.core.plugins",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "rich.table",
    "torch._dynamo",  # which the first optimiser imports: half of the time of a short run
)
"""What commands import, beside their own modules of `bridge.cli`."""


class Done(subprocess.CompletedProcess[str]):
    """The end of a command, with the CPU time that it took."""

    cpu_seconds: float


def run(words: Sequence[str | Path], *, cwd: str | Path | None = None, env: Mapping[str, str] | None = None) -> Done:
    """Run ``precision-bridge ...`` or ``python [-W ignore] (FILE | -c CODE | -m MODULE) ...``."""
    (done,) = _all([words], cwd=cwd, environments=[os.environ if env is None else env])
    return done


def launch(words: Sequence[str | Path], *, processes: int, cwd: str | Path | None = None) -> list[Done]:
    """Run a command as the ranks of one job, with torchrun's environment; a rank that fails ends the others."""
    with ranks_of_a_job(processes) as ranks:
        return _all([words] * processes, cwd=cwd, environments=[{**os.environ, **rank} for rank in ranks])


@contextmanager
def ranks_of_a_job(processes: int) -> Iterator[list[dict[str, str]]]:
    """Hold the store of a job, and yield torchrun's variables for each rank; no port is free between two processes."""
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    size = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
    job = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", **size}
    yield [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def _all(
    commands: Sequence[Sequence[str | Path]],
    *,
    cwd: str | Path | None,
    environments: Sequence[Mapping[str, str]],
) -> list[Done]:
    """Run commands at the same time."""
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        requests: list[dict[str, Any]] = [
            {
                "words": [str(word) for word in words],
                "cwd": str(cwd or Path.cwd()),
                "env": dict(environment),
                "out": f"{folder}/{number}.out",
                "err": f"{folder}/{number}.err",
            }
            for number, (words, environment) in enumerate(zip(commands, environments, strict=True))
        ]
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(requests) + "\n")
        server.stdin.flush()
        line = server.stdout.readline()
        assert line, f"the warm process ended with exit code {server.wait()}"
        answer = json.loads(line)
        found = []
        for request, (code, seconds) in zip(requests, answer, strict=True):
            out, err = (Path(request[name]).read_text(encoding="utf-8") for name in ("out", "err"))
            done = Done(request["words"], code, out, err)
            done.cpu_seconds = seconds
            found.append(done)
    return found


@functools.cache
def _server() -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, __file__], cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(process.communicate)  # the end of its input ends it
    return process


def _serve() -> None:
    """Answer each line of stdin, a list of commands, with a line of (exit code, CPU seconds)."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "tests"]
    errors = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings of other libraries at import
    from bridge.cli.commands import COMMANDS

    for module in IMPORTED:
        importlib.import_module(module)
    for command in COMMANDS.values():
        command.load()

    os.dup2(errors, 2)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        children: dict[int, int] = {}
        for number, request in enumerate(json.loads(line)):
            child = os.fork()
            if child == 0:
                _command(request)
            children[child] = number
        answer: list[tuple[int, float]] = [(0, 0.0)] * len(children)
        while children:
            child, status, usage = os.wait3(0)
            if child in children:
                code = os.waitstatus_to_exitcode(status)
                answer[children.pop(child)] = (code, usage.ru_utime + usage.ru_stime)
                if code:
                    for other in children:
                        os.kill(other, signal.SIGTERM)
        print(json.dumps(answer), flush=True)  # noqa: T201


def _command(request: dict[str, Any]) -> NoReturn:
    """Become the command in this fork."""
    signal.alarm(LIMIT_SECONDS)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for number, name in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    code = 0
    try:
        _interpret(request["words"])
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001  as the interpreter itself would
        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _interpret(words: list[str]) -> None:
    """Do what ``python`` or the installed script does with its words."""
    program, *rest = words
    searched = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [path for path in searched if path not in sys.path]
    if Path(program).name == COMMAND.name:
        sys.argv = [str(COMMAND), *rest]
        runpy.run_path(str(COMMAND), run_name="__main__")
        return
    assert Path(program).name.startswith("python"), f"no warm process for {program}"
    while rest[0] == "-W":
        warnings.simplefilter(rest[1])  # type: ignore[arg-type]
        del rest[:2]
    sys.argv = rest
    if rest[0] == "-c":
        code = rest.pop(1)
        sys.path.insert(0, "")
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))  # noqa: S102  the test's own code
    elif rest[0] == "-m":
        del rest[0]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(rest[0]).resolve().parent))
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    _serve()
