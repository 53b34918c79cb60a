"""`folder_lock`: one run writes into a folder; the lock of a run that died is taken over.

The lock is a file with host and process id that its holder keeps locked with `flock`, which the kernel drops with the
process. Where another machine of a shared file system does not see that, the file's time is watched: the holder sets
it every few seconds.
"""

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bridge.errors import CheckpointError

LOCK = ".precision-bridge.lock"
BEAT_SECONDS = 2.0
"""Between two signs of life of a holder."""
WATCHED_SECONDS = 10.0
"""How long the lock of another machine is watched before it counts as left behind."""


@contextmanager
def folder_lock(folder: Path, *, key: str = "checkpoint.save") -> Iterator[str | None]:
    """Hold the lock of a folder, which the setting `key` names and which is made where it does not exist.

    Yield a sentence where the lock of a run that died was taken over, else None.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = _acquired(folder, key)
    except OSError as error:
        rule, why = (
            "must be a folder that can be written to",
            error.strerror or type(error).__name__,
        )
        raise CheckpointError(
            f"{key}: {rule}, got {str(folder)!r} ({why}). Choose another."
        ) from error
    ended = threading.Event()
    beat = threading.Thread(target=_beat, args=(handle, ended), daemon=True)
    try:
        before = _holder(handle)
        os.ftruncate(handle, 0)
        os.pwrite(
            handle, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0
        )
        beat.start()
        yield (
            f"{folder}: the lock of {_named(before)}, which no longer runs, was taken over."
            if before
            else None
        )
    finally:
        ended.set()
        if beat.ident is not None:
            beat.join()
        (folder / LOCK).unlink(missing_ok=True)
        os.close(handle)


def require_unlocked(folder: Path, key: str) -> None:
    """Refuse a folder whose lock another process of this machine holds; nothing is made."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _held(folder, key, _holder(handle)) from None
    finally:
        os.close(handle)


def _held(folder: Path, key: str, holder: dict[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"{key}: one run may write into a folder, got {str(folder)!r}, which {_named(holder)} writes into. Choose "
        "another folder, or wait for the end of that run."
    )


def _acquired(folder: Path, key: str) -> int:
    path = folder / LOCK
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = _is_left_behind(handle)
        except BlockingIOError:
            is_free = False
        if not is_free:
            error = _held(folder, key, _holder(handle))
            os.close(handle)
            raise error
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            return handle
        os.close(handle)  # the last holder removed the file between the two calls


def _is_left_behind(handle: int) -> bool:
    holder = _holder(handle)
    if not holder or holder.get("host") == socket.gethostname():
        return True  # the kernel would have refused the lock
    before = os.fstat(handle).st_mtime_ns
    time.sleep(WATCHED_SECONDS)
    return os.fstat(handle).st_mtime_ns == before


def _holder(handle: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(handle, 4096, 0))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _named(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid', '?')} on {holder.get('host', 'an unknown host')}"


def _beat(handle: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        os.utime(handle)
