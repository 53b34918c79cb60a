"""`found_above`: a file that a launch script names by its path from the folder where the script is run."""

from __future__ import annotations

import os
from pathlib import Path

from bridge.read.launch.word import UNKNOWN

UPWARDS = 6
"""Folders above a script in which a file of its repository is looked up."""


def found_above(name: str, script: Path) -> Path | None:
    """Return the file of a name: from here, or from one of the folders above the script; None where it is not there.

    A beginning that only the run knows (`$ROOT/conf/run.yaml`) is left out.
    """
    unknown = [*UNKNOWN.finditer(name)]
    known = name[unknown[-1].end() :].lstrip("/") if unknown else name
    if not known or not known.isprintable():
        return None
    for folder in (Path(), *script.absolute().parents[:UPWARDS]):
        path = folder / known
        if os.path.isfile(path):  # noqa: PTH113  a path may be too long for Path.is_file
            return path
    return None
