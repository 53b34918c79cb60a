"""The release of Megatron Core that a rehearsal imports: the newest at hand that is not newer than the target's.

At hand are the installed one and one in the folder ``megatron-next`` of the environment, which ``make setup`` fills and
which is on no path unless it is asked for.
"""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import RunConfigError
from bridge.target.versions import Version, installed, parse_version

FOLDER = "megatron-next"
_PACKAGE = Path("megatron") / "core" / "package_info.py"
_COMPLETE = "sitecustomize.py"
"""The file that is written last."""


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
        path = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(path)}


def release_for(wanted: Version | None, *, prefix: Path | None = None) -> Release:
    """Return the newest release at hand that is not newer than the wanted one.

    It is the newest at hand where None is wanted, and the installed one where all are newer. `prefix` is that of the
    environment.
    """
    own = Release(version=installed("mcore"))
    folder = (Path(sys.prefix) if prefix is None else prefix) / FOLDER
    other = _version_in(folder)
    if other is None or own.version is None or other <= own.version:
        return own
    is_admitted = wanted is None or other.release[: len(wanted.release)] <= wanted.release
    return Release(version=other, folder=folder) if is_admitted else own


def _version_in(folder: Path) -> Version | None:
    """Return the version of the Megatron Core in a folder, None where it is not there as a whole."""
    if not (folder / _COMPLETE).is_file() or not (folder / _PACKAGE).is_file():
        return None
    numbers = re.findall(
        r"^(?:MAJOR|MINOR|PATCH) = (\d+)", (folder / _PACKAGE).read_text("utf-8"), re.MULTILINE
    )
    try:
        return parse_version(".".join(numbers))
    except RunConfigError:
        return None
