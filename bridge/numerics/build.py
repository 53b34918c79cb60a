"""Compiling the C kernel once per machine: in the background, into the user's cache, atomically.

A run never waits for the compiler. The first call starts it (about a second of one core) and returns; until the library
is there, plain torch computes the same values. The file name in the cache holds a hash of source, compiler, flags and
processor, so that another machine on the same home directory compiles its own. Several processes may compile at the
same time: each writes a file of its own and renames it into place.

Threads are those of torch: the kernel's OpenMP symbols resolve against the runtime that torch has loaded already. A
second OpenMP runtime would bring a second set of threads, spinning against the first.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

_log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernel.c")

FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-std=gnu11")
"""No -ffast-math: it reorders additions and flushes subnormals to zero for the whole process."""

THREADS = (("-fopenmp",), ())
"""Compiler flags for threads, best first."""


class Build:
    """Compilation and loading of the library, shared by all threads of a process."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """Why there is no library; None while there may be one."""
        self._library: ctypes.CDLL | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def library(self, *, wait: bool) -> ctypes.CDLL | None:
        """Return the loaded library; None while it is compiled, unless `wait` waits for that, or where it cannot be."""
        with self._lock:
            if self._library is None and self._thread is None and self.problem is None:
                self._start()
            thread = self._thread
        if wait and thread is not None:
            thread.join()
        return self._library

    def _start(self) -> None:
        compiler = _compiler()
        if compiler is None:
            self._fail("There is no C compiler (cc, gcc or clang) on the PATH.")
            return
        target = cache_folder() / f"kernel-{_key(compiler)}.so"
        if target.exists() and self._load(target):
            return
        _log.info(
            "Compiling the quantisation kernel with %s; until it is ready, plain torch computes the same.", compiler
        )
        self._thread = threading.Thread(target=self._compile, args=(compiler, target), daemon=True)
        self._thread.start()

    def _compile(self, compiler: str, target: Path) -> None:
        fault = ""
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                for threads in THREADS:
                    made = Path(folder) / f"kernel{len(threads)}.so"
                    fault = _run([compiler, *FLAGS, *threads, "-c", str(SOURCE), "-o", f"{made}.o"])
                    fault = fault or _run([compiler, "-shared", f"{made}.o", "-o", str(made), *_runtime(threads)])
                    if not fault:
                        made.replace(target)
                        break
        except OSError as error:
            fault = str(error)
        if fault:
            self._fail(f"{compiler} failed: {fault}")
        elif self._load(target):
            _log.info("The quantisation kernel is ready: %s", target)

    def _load(self, target: Path) -> bool:
        try:
            self._library = ctypes.CDLL(str(target))
        except OSError as error:
            self._fail(f"The compiled kernel cannot be loaded: {error}.")
            return False
        return True

    def _fail(self, problem: str) -> None:
        self.problem = problem
        _log.warning("%s Quantisation runs in plain torch, several times slower, with the same values.", problem)


def cache_folder() -> Path:
    """Return the folder of compiled kernels: the user's cache folder, or a temporary one where that is read-only."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "precision-bridge"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if os.access(folder, os.W_OK):
        return folder
    return Path(tempfile.gettempdir()) / f"precision-bridge-{os.getuid()}"


def _compiler() -> str | None:
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def _runtime(threads: tuple[str, ...]) -> list[str]:
    """Return the linker's arguments for the OpenMP runtime, torch's own where it can be found."""
    if not threads:
        return ["-lm"]
    own = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return [str(own[0]), "-lm"] if own else [*threads, "-lm"]


def _run(command: list[str]) -> str:
    """Run a compiler; return its complaint, an empty string where it succeeded."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  (a fixed command line)
    if done.returncode == 0:
        return ""
    return (done.stderr or done.stdout or f"exit code {done.returncode}").strip().splitlines()[-1]


@cache
def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout  # noqa: S603
    facts = [version, *FLAGS, str(THREADS), torch.__version__, torch.__file__, _processor(), SOURCE.read_text()]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:24]


def _processor() -> str:
    """Return the processor's model and instruction sets: -march=native means something else on each."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    seen = {line.split(":")[0].strip(): line for line in lines if line.startswith(wanted)}
    return "\n".join(seen.values())
