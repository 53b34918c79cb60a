"""`find_repository_file`: a file that a launch script names by a path in its repository.

    python train.py --config conf/run.yaml

Such a script is in a folder like `examples/`. A user runs it from the top of the repository.
"""

from __future__ import annotations

import os
from pathlib import Path

from bridge.read.launch.shell_word import OPEN_PIECE_PATTERN

MAX_PARENT_FOLDERS = 6
"""The number of folders above a script in which a file is looked for."""


def find_repository_file(name: str, script: Path) -> Path | None:
    """Return the file that a script names; None if there is no such file.

    The current folder is searched first, then the folders above the script.

    Args:
        name: The file as the script names it. A beginning that only the run knows
            (`$ROOT/conf/run.yaml`) is ignored.
    """
    open_pieces = [*OPEN_PIECE_PATTERN.finditer(name)]
    known_end = name
    if open_pieces:
        known_end = name[open_pieces[-1].end() :].lstrip("/")
    if not known_end or not known_end.isprintable():
        return None
    for folder in (Path(), *script.absolute().parents[:MAX_PARENT_FOLDERS]):
        path = folder / known_end
        if os.path.isfile(path):  # noqa: PTH113  a path may be too long for Path.is_file
            return path
    return None
