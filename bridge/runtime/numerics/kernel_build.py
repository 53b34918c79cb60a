"""`KernelBuild`: compiles the C kernel once per machine, in the background, into the user's cache.

A run does not wait for the compilation. The first call asks the compiler for its macros (some
milliseconds; at most `MACROS_TIMEOUT_SECONDS`), starts it in a thread (about a second of a core) and
returns. Until the library is ready, plain torch computes the same values. The name of the file in
the cache has two hashes. The hash of source, compiler, flags and processor gives machines with the
same home directory separate files. The other hash is the hash of the file's content. Several
processes may compile at the same time: each writes a separate file and renames it into place.

A library is code. It is loaded only if no other user can have written it. The folder must belong to
this user and be closed to all other users, and the content must have the hash in the name. Any
other file is removed and compiled again. Without such a folder each process compiles into a private
temporary folder.

The kernel uses torch's threads, because its OpenMP symbols resolve against the runtime that torch
has loaded. A second OpenMP runtime would start a second set of threads, which would compete for the
cores.

`torch.utils.cpp_extension` is not used. It needs a C++ compiler and ninja, compiles torch's headers
too, lets the first call wait for the compiler, and loads a library without a check of its author.
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
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

_log = logging.getLogger(__name__)

KERNEL_SOURCE = Path(__file__).with_name("kernel.c")

COMPILER_FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-std=gnu11",
)
"""No -ffast-math: it reorders additions and flushes subnormals to zero for the whole process."""

MACROS_TIMEOUT_SECONDS = 20.0
COMPILE_TIMEOUT_SECONDS = 300.0

OPENMP_FLAGS = (("-fopenmp",), ())
"""Compiler flags for threads, best first."""


class KernelBuild:
    """Compilation and loading of the library, shared by all threads of a process."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """A sentence about why the library cannot be compiled. None: no problem."""
        self._library: ctypes.CDLL | None = None
        self._load_error = ""
        """The loader's message about the last library that could not be loaded."""
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def get_library(self, *, wait: bool) -> ctypes.CDLL | None:
        """Return the loaded library, or None if it cannot be compiled.

        Args:
            wait: Whether the call waits for the compiler. Otherwise the result is None while the
                library is compiled.
        """
        with self._lock:
            if self._library is None and self._thread is None and self.problem is None:
                self._start()
            thread = self._thread
        if wait and thread is not None:
            thread.join()
        return self._library

    def _start(self) -> None:
        """Load the library from the cache, or start the thread that compiles it."""
        compiler = _find_compiler()
        if compiler is None:
            self._fail("There is no C compiler (cc, gcc or clang) on the PATH.")
            return
        folder = get_cache_folder()
        try:
            stem = f"kernel-{_hash_build_inputs(compiler)}"
        except (OSError, subprocess.TimeoutExpired) as error:
            self._fail(f"{compiler} -dM failed: {error}.")
            return
        if folder is not None:
            for cached in sorted(folder.glob(f"{stem}-*.so")):
                if not _is_sound_library(cached, stem):
                    _remove_library(cached)
                elif self._load(cached):
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
        """Compile the library into the cache or a temporary folder, and load it."""
        fault = ""
        try:
            with tempfile.TemporaryDirectory(dir=folder, prefix="precision-bridge-") as scratch:
                for openmp_flags in OPENMP_FLAGS:
                    library = Path(scratch) / f"kernel-{len(openmp_flags)}-openmp-flags.so"
                    fault = _compile_and_link(compiler, openmp_flags, library)
                    if not fault:
                        if folder is not None:
                            library = library.replace(folder / f"{stem}-{_hash_file(library)}.so")
                        self._load(library)  # a loaded library no longer needs its file
                        break
        except OSError as error:
            fault = str(error)
        if fault:
            self._fail(f"{compiler} failed: {fault}")
        elif self._library is None:
            self._fail(f"The compiled kernel cannot be loaded: {self._load_error}.")
        elif folder is None:
            _log.info("The quantisation kernel is ready.")
        else:
            _log.info("The quantisation kernel is ready in %s.", folder)

    def _load(self, target: Path) -> bool:
        """Load a library, and return whether that worked."""
        try:
            self._library = ctypes.CDLL(str(target))
        except OSError as error:
            self._load_error = str(error)
        return self._library is not None

    def _fail(self, problem: str) -> None:
        """Log a problem, and compile no more in this process."""
        self.problem = problem
        _log.warning(
            "%s Quantisation runs in plain torch, several times slower, with the same values.",
            problem,
        )


def _compile_and_link(compiler: str, openmp_flags: tuple[str, ...], library: Path) -> str:
    """Compile and link the kernel, and return the compiler's message. Empty: it succeeded."""
    compiled = f"{library}.o"
    fault = _run_compiler(
        [compiler, *COMPILER_FLAGS, *openmp_flags, "-c", str(KERNEL_SOURCE), "-o", compiled]
    )
    if fault:
        return fault
    return _run_compiler(
        [compiler, "-shared", compiled, "-o", str(library), *_get_openmp_arguments(openmp_flags)]
    )


def get_cache_folder() -> Path | None:
    """Return the folder of compiled kernels in the user's cache.

    The folder is made with mode 0700. The result is None for a folder that is a link, belongs to
    another user, is open to other users, or cannot be written to.
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
    is_folder_of_user = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_folder_of_user or stat.S_IMODE(status.st_mode) & 0o077:
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


def _is_sound_library(library: Path, stem: str) -> bool:
    """Return whether only this user can have written a library, and its hash is in its name.

    Args:
        library: A file in the cache.
        stem: Its name before the hash of the content.
    """
    status = library.lstat()
    is_file_of_user = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    is_closed = not status.st_mode & 0o022
    return is_file_of_user and is_closed and library.name == f"{stem}-{_hash_file(library)}.so"


def _remove_library(library: Path) -> None:
    """Remove a library that must not be loaded from the cache, and log it."""
    _log.warning(
        "%s: is not the file that was compiled. It is removed and compiled again.", library
    )
    with suppress(OSError):
        library.unlink()


def _hash_file(path: Path) -> str:
    """Return a hash of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _find_compiler() -> str | None:
    """Return the path of a C compiler, or None without one."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def _get_openmp_arguments(threads: tuple[str, ...]) -> list[str]:
    """Return the linker's arguments for the OpenMP runtime, which is torch's if it is found."""
    if not threads:
        return ["-lm"]
    of_torch = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if of_torch:
        return [str(of_torch[0]), "-lm"]
    return [*threads, "-lm"]


def _run_compiler(command: list[str]) -> str:
    """Run a compiler, and return its last line of output. Empty: it succeeded."""
    try:
        done = _run_command(command, COMPILE_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"it did not end within {COMPILE_TIMEOUT_SECONDS} s"
    if done.returncode == 0:
        return ""
    complaint = done.stderr or done.stdout or f"exit code {done.returncode}"
    return complaint.strip().splitlines()[-1]


def _run_command(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command of fixed arguments, without a shell.

    Raises:
        TimeoutExpired: The command did not end in time. A compiler may wait for a licence.
    """
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)  # noqa: S603


@cache
def _hash_build_inputs(compiler: str) -> str:
    """Return a hash of source, compiler, flags, processor and torch."""
    # The compiler's macros name its version, and the processor and instruction sets that
    # -march=native means here.
    done = _run_command(
        [compiler, "-dM", "-E", *COMPILER_FLAGS, "-xc", os.devnull], MACROS_TIMEOUT_SECONDS
    )
    if done.returncode or not done.stdout:
        raise OSError(f"{compiler} does not say which processor it compiles for")
    facts = [
        done.stdout,
        *COMPILER_FLAGS,
        str(OPENMP_FLAGS),
        torch.__version__,
        torch.__file__,
        KERNEL_SOURCE.read_text(),
    ]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:24]
