"""`lock_folder`: a single run writes into a folder, and a new run replaces the lock of a dead run.

The lock is a file that names the process. `filelock` keeps it locked by `flock`, and the kernel
releases it at the end of the process. On a file system whose `flock` is local to a machine (Lustre
mounted with `localflock`), runs on other machines are not seen.
"""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from bridge.errors import CheckpointError

LOCK_FILE = ".precision-bridge.lock"
_HOLDER_PATTERN = re.compile(r"process \d+ on [\w.-]+")
"""The pattern of the lock's content, which a message can quote."""


@contextmanager
def lock_folder(folder: Path, *, key: str = "checkpoint.save") -> Iterator[str | None]:
    """Hold the lock of a folder in a ``with`` block. The folder is made if it does not exist.

    Args:
        key: Setting that names the folder, for the messages.

    Yields:
        A sentence if the lock of a dead run was replaced, or None otherwise.

    Raises:
        CheckpointError: Another run holds the lock, or the folder cannot be written to.
    """
    path = folder / LOCK_FILE
    lock = FileLock(path, blocking=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        before = _read_holder(path)
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
    except Timeout:
        raise _make_in_use_error(folder, key) from None
    except OSError as error:
        lock.release()
        reason = error.strerror or type(error).__name__
        raise CheckpointError(
            f"{key}: must be a folder that can be written to, got {str(folder)!r} ({reason}). "
            "Choose another."
        ) from error
    note = None
    if before is not None:
        note = f"{folder}: the lock of {before}, which no longer runs, was taken over."
    try:
        yield note
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def require_unlocked(folder: Path, key: str) -> None:
    """Refuse a folder whose lock another process holds. No folder or file is made.

    A lock that cannot be read is accepted here. `lock_folder` reports it when the run begins.

    Raises:
        CheckpointError: Another process holds the lock.
    """
    path = folder / LOCK_FILE
    if not path.is_file():
        return
    try:
        with FileLock(path, blocking=False):
            return
    except Timeout:
        raise _make_in_use_error(folder, key) from None
    except OSError:
        return


def _make_in_use_error(folder: Path, key: str) -> CheckpointError:
    """Return the error of a folder that another process writes into."""
    holder = _read_holder(folder / LOCK_FILE) or "another process"
    return CheckpointError(
        f"{key}: one run may write into a folder, got {str(folder)!r}, which {holder} writes into. "
        "Choose another folder, or wait for the end of that run."
    )


def _read_holder(path: Path) -> str | None:
    """Return the process that a lock names, "process 7 on host", or None if it names no process."""
    with path.open(encoding="utf-8", errors="replace") as file:
        holder = file.read(4096)
    if _HOLDER_PATTERN.fullmatch(holder):
        return holder
    return None
