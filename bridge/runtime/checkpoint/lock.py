"""`folder_lock`: one run writes into a folder; the lock of a run that died is taken over.

The lock is a file that its holder keeps locked with `filelock`, by `flock`: the kernel drops it with the process. The
file names the process. On a file system that keeps `flock` to one machine (Lustre mounted with `localflock`), a run on
another machine is not seen.
"""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from bridge.errors import CheckpointError

LOCK = ".precision-bridge.lock"
_HOLDER = re.compile(r"process \d+ on [\w.-]+")


@contextmanager
def folder_lock(folder: Path, *, key: str = "checkpoint.save") -> Iterator[str | None]:
    """Hold the lock of a folder, which the setting `key` names and which is made where it does not exist.

    Yield a sentence where the lock of a run that died was taken over, else None.
    """
    path = folder / LOCK
    lock = FileLock(path, blocking=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        before = _holder(path)
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
    except Timeout:
        raise _in_use(folder, key) from None
    except OSError as error:
        lock.release()
        rule, why = (
            "must be a folder that can be written to",
            error.strerror or type(error).__name__,
        )
        raise CheckpointError(
            f"{key}: {rule}, got {str(folder)!r} ({why}). Choose another."
        ) from error
    try:
        yield (
            f"{folder}: the lock of {before}, which no longer runs, was taken over."
            if before
            else None
        )
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def require_unlocked(folder: Path, key: str) -> None:
    """Refuse a folder whose lock another process holds; nothing is made."""
    path = folder / LOCK
    if not path.is_file():
        return
    try:
        with FileLock(path, blocking=False):
            return
    except Timeout:
        raise _in_use(folder, key) from None
    except OSError:
        return


def _in_use(folder: Path, key: str) -> CheckpointError:
    holder = _holder(folder / LOCK) or "another process"
    return CheckpointError(
        f"{key}: one run may write into a folder, got {str(folder)!r}, which {holder} writes into. Choose another "
        "folder, or wait for the end of that run."
    )


def _holder(path: Path) -> str | None:
    """Return the process that a lock names, as a noun, or None where its file is empty or damaged."""
    with path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(4096)
    return text if _HOLDER.fullmatch(text) else None
