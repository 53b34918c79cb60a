"""The release of Megatron Core that a rehearsal imports: the newest that is not above the target's.

The releases on this machine are the installed release and, where ``make setup`` has filled it, the
release in the folder ``megatron-next`` of the environment. That folder is on no path by default.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from bridge.target.versions import (
    UNPACKED_FOLDER,
    Version,
    find_newer_megatron,
    get_installed_version,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """A release of Megatron Core on this machine."""

    version: Version | None
    folder: Path | None = None
    """Folder to put first on the path; None for the installed release."""

    def environment(self) -> dict[str, str]:
        """Return the environment variables with which a process imports the release."""
        if self.folder is None:
            return {}
        path = str(self.folder)
        before = os.environ.get("PYTHONPATH")
        if before:
            path = os.pathsep.join([path, before])
        return {"PYTHONPATH": path}


def list_local_releases(*, prefix: Path | None = None) -> list[Release]:
    """Return the releases on this machine, the installed release first.

    Args:
        prefix: Prefix of the Python environment, None for that of this process.
    """
    releases = []
    current = get_installed_version("mcore")
    if current is not None:
        releases.append(Release(version=current))
    newer = find_newer_megatron(prefix)
    if newer is not None:
        if prefix is None:
            prefix = Path(sys.prefix)
        releases.append(Release(version=newer, folder=prefix / UNPACKED_FOLDER))
    return releases


def find_release(wanted: Version | None, *, prefix: Path | None = None) -> Release:
    """Return the newest release on this machine that is not newer than the wanted release.

    Args:
        wanted: None wants the newest release.
        prefix: Prefix of the Python environment, None for that of this process.

    Returns:
        The installed release where every release is newer than the wanted release.
    """
    for release in reversed(list_local_releases(prefix=prefix)):
        version = release.version
        if version is None or wanted is None:
            return release
        if version.release[: len(wanted.release)] <= wanted.release:
            return release
    return Release(version=get_installed_version("mcore"))
