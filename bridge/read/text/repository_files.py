"""`find_repository_file`: a file that a launch script names by its path from the folder where it is run.

python train.py --config conf/run.yaml    # in examples/, run from the top of its repository
"""

from __future__ import annotations

import os
from pathlib import Path

from bridge.read.launch.shell_word import UNKNOWN_PATTERN

MAX_PARENT_FOLDERS = 6
"""Folders above a script in which a file of its repository is looked up."""


def find_repository_file(name: str, script: Path) -> Path | None:
    """Return the file of a name, from this folder or from one above the script.

    It is None where there is no such file. A beginning that only the run knows
    (`$ROOT/conf/run.yaml`) is left out.
    """
    unknown = [*UNKNOWN_PATTERN.finditer(name)]
    known = name
    if unknown:
        known = name[unknown[-1].end() :].lstrip("/")
    if not known or not known.isprintable():
        return None
    for folder in (Path(), *script.absolute().parents[:MAX_PARENT_FOLDERS]):
        path = folder / known
        if os.path.isfile(path):  # noqa: PTH113  a path may be too long for Path.is_file
            return path
    return None
