"""Compiling the C kernel once per machine: in the background, into the user's cache, atomically.

A run never waits for the compiler. The first call starts it (about a second of one core) and
returns; until the library is there, plain torch computes the same values. The file name in the
cache holds a hash of source, compiler, flags and processor, so that another machine on the same
home directory compiles its own, and a hash of the file's own content. Several processes may compile
at the same time: each writes a file of its own and renames it into place.

A library is code, so only a file that nobody else can have written is loaded: the folder belongs to
this user and is closed to all others, and the content has the hash of the name. Any other file is
compiled again. Where the cache is no such folder, each process compiles into a private temporary
folder.

Threads are those of torch: the kernel's OpenMP symbols resolve against the runtime that torch has
loaded already. A second OpenMP runtime would bring a second set of threads, spinning against the
first.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

_log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernel.c")

FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-std=gnu11",
)
"""No -ffast-math: it reorders additions and flushes subnormals to zero for the whole process."""

MACROS_SECONDS = 20.0
COMPILE_SECONDS = 300.0

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
        """Return the loaded library; None where it cannot be compiled.

        While it is compiled the answer is None too, unless `wait` waits for the end.
        """
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
        folder = cache_folder()
        try:
            stem = f"kernel-{_key(compiler)}"
        except (OSError, subprocess.TimeoutExpired) as error:
            self._fail(f"{compiler} -dM failed: {error}.")
            return
        if folder is not None:
            for cached in _sound_libraries(folder, stem):
                if self._load(cached):
                    return
        _log.info(
            "Compiling the quantisation kernel with %s; until then plain torch computes the same.",
            compiler,
        )
        self._thread = threading.Thread(
            target=self._compile, args=(compiler, folder, stem), daemon=True
        )
        self._thread.start()

    def _compile(self, compiler: str, folder: Path | None, stem: str) -> None:
        fault = ""
        try:
            with tempfile.TemporaryDirectory(dir=folder, prefix="precision-bridge-") as scratch:
                for threads in THREADS:
                    library = Path(scratch) / f"kernel{len(threads)}.so"
                    fault = _made(compiler, threads, library)
                    if not fault:
                        if folder is not None:
                            library = library.replace(folder / f"{stem}-{_digest(library)}.so")
                        self._load(library)  # a library that is loaded needs its file no longer
                        break
        except OSError as error:
            fault = str(error)
        if fault:
            self._fail(f"{compiler} failed: {fault}")
        elif self._library is None:
            self._fail("The compiled kernel cannot be loaded.")
        elif folder is None:
            _log.info("The quantisation kernel is ready.")
        else:
            _log.info("The quantisation kernel is ready in %s.", folder)

    def _load(self, target: Path) -> bool:
        with suppress(OSError):
            self._library = ctypes.CDLL(str(target))
        return self._library is not None

    def _fail(self, problem: str) -> None:
        self.problem = problem
        _log.warning(
            "%s Quantisation runs in plain torch, several times slower, with the same values.",
            problem,
        )


def _made(compiler: str, threads: tuple[str, ...], library: Path) -> str:
    """Compile and link the kernel; return the compiler's complaint, "" where there is none."""
    compiled = f"{library}.o"
    fault = _run([compiler, *FLAGS, *threads, "-c", str(SOURCE), "-o", compiled])
    if fault:
        return fault
    return _run([compiler, "-shared", compiled, "-o", str(library), *_runtime(threads)])


def cache_folder() -> Path | None:
    """Return the folder of compiled kernels in the user's cache.

    It is made with mode 0700. The answer is None where it cannot be trusted or written to: a folder
    that is a link, belongs to another user or is open to others is not used.
    """
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = caches / "precision-bridge" / "kernels"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home folder
        _log.info("There is no cache of compiled kernels: %s.", error)
        return None
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or stat.S_IMODE(status.st_mode) & 0o077:
        _log.warning(
            "%s: must be a folder of this user with mode 0700, got owner %d and mode %s. "
            "No kernel there is used; this process compiles its own. Remove the folder.",
            folder,
            status.st_uid,
            stat.filemode(status.st_mode),
        )
        return None
    if not os.access(folder, os.W_OK):
        return None
    return folder


def _sound_libraries(folder: Path, stem: str) -> Iterator[Path]:
    """Yield the libraries of a name that this user wrote, with the content of the name's hash."""
    for path in sorted(folder.glob(f"{stem}-*.so")):
        status = path.lstat()
        is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        is_closed = not status.st_mode & 0o022
        if is_own and is_closed and path.name == f"{stem}-{_digest(path)}.so":
            yield path
        else:
            _log.warning(
                "%s: is not the file that was compiled. It is removed and compiled again.", path
            )
            with suppress(OSError):
                path.unlink()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def _runtime(threads: tuple[str, ...]) -> list[str]:
    """Return the linker's arguments for the OpenMP runtime, torch's own where it can be found."""
    if not threads:
        return ["-lm"]
    of_torch = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if of_torch:
        return [str(of_torch[0]), "-lm"]
    return [*threads, "-lm"]


def _run(command: list[str]) -> str:
    """Run a compiler; return its complaint, an empty string where it succeeded."""
    try:
        done = _ran(command, COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        return f"it did not end within {COMPILE_SECONDS} s"
    if done.returncode == 0:
        return ""
    complaint = done.stderr or done.stdout or f"exit code {done.returncode}"
    return complaint.strip().splitlines()[-1]


def _ran(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a fixed command line.

    Raises:
        TimeoutExpired: It did not end in time; a compiler may wait for a licence.
    """
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)  # noqa: S603


@cache
def _key(compiler: str) -> str:
    # The compiler's macros name its version, and the processor and instruction sets that
    # -march=native means here.
    done = _ran([compiler, "-dM", "-E", *FLAGS, "-xc", os.devnull], MACROS_SECONDS)
    if done.returncode or not done.stdout:
        raise OSError(f"{compiler} does not say which processor it compiles for")
    facts = [
        done.stdout,
        *FLAGS,
        str(THREADS),
        torch.__version__,
        torch.__file__,
        SOURCE.read_text(),
    ]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:24]
