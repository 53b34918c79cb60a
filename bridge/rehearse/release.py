"""The release of Megatron Core that a rehearsal imports.

It is the newest release on this machine that is not newer than the release of the target. A machine
has the installed release. If ``make setup`` has filled the folder ``megatron-next`` of the Python
environment, the machine has the release in that folder too. The folder is not on the import path by
default.
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
    """The version. None: no Megatron Core is installed."""
    folder: Path | None = None
    """Folder to put first on the import path. None: the release is installed."""

    def environment(self) -> dict[str, str]:
        """Return the environment variables with which a process imports the release."""
        if self.folder is None:
            return {}
        path = str(self.folder)
        inherited = os.environ.get("PYTHONPATH")
        if inherited:
            path = os.pathsep.join([path, inherited])
        return {"PYTHONPATH": path}


def list_local_releases(*, prefix: Path | None = None) -> list[Release]:
    """Return the releases on this machine, the installed release first.

    Args:
        prefix: Prefix of the Python environment. None: the environment of this process.
    """
    releases = []
    installed = get_installed_version("mcore")
    if installed is not None:
        releases.append(Release(version=installed))
    newer = find_newer_megatron(prefix)
    if newer is not None:
        if prefix is None:
            prefix = Path(sys.prefix)
        releases.append(Release(version=newer, folder=prefix / UNPACKED_FOLDER))
    return releases


def find_release(wanted: Version | None, *, prefix: Path | None = None) -> Release:
    """Return the newest release on this machine that is not newer than the wanted release.

    Args:
        wanted: The release of the target. None: the newest release on this machine.
        prefix: Prefix of the Python environment. None: the environment of this process.

    Returns:
        The installed release if every release is newer than the wanted release.
    """
    for release in reversed(list_local_releases(prefix=prefix)):
        version = release.version
        if version is None or wanted is None:
            return release
        # The target may leave out the last numbers: 0.17.1 is not newer than 0.17.
        if version.release[: len(wanted.release)] <= wanted.release:
            return release
    return Release(version=get_installed_version("mcore"))
