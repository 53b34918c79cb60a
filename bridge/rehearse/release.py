"""The release of Megatron Core that a rehearsal imports: the newest one not above the target's.

At hand are the installed one and one in the folder ``megatron-next`` of the environment, which
``make setup`` fills and which is on no path unless it is asked for.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from bridge.target.versions import UNPACKED, Version, installed, newer_megatron


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """A release at hand."""

    version: Version | None
    folder: Path | None = None
    """Folder to put first on the path; None: it is installed."""

    def environment(self) -> dict[str, str]:
        """Return the variables with which a process imports it."""
        if self.folder is None:
            return {}
        path = str(self.folder)
        before = os.environ.get("PYTHONPATH")
        if before:
            path = os.pathsep.join([path, before])
        return {"PYTHONPATH": path}


def releases_at_hand(*, prefix: Path | None = None) -> list[Release]:
    """Return the releases at hand, the installed one first; `prefix` is that of the environment."""
    releases = []
    current = installed("mcore")
    if current is not None:
        releases.append(Release(version=current))
    newer = newer_megatron(prefix)
    if newer is not None:
        if prefix is None:
            prefix = Path(sys.prefix)
        releases.append(Release(version=newer, folder=prefix / UNPACKED))
    return releases


def release_for(wanted: Version | None, *, prefix: Path | None = None) -> Release:
    """Return the newest release at hand that is not newer than the wanted one.

    It is the newest at hand where None is wanted, and the installed one where all are newer.
    `prefix` is that of the environment.
    """
    for release in reversed(releases_at_hand(prefix=prefix)):
        version = release.version
        if version is None or wanted is None:
            return release
        if version.release[: len(wanted.release)] <= wanted.release:
            return release
    return Release(version=installed("mcore"))
