"""`find_named_file`: the file that a script sources, found next to the script.

    source "$(dirname "$0")/../models/qwen3.sh"     # by the known end of the path
    source /opt/slime/scripts/models/qwen3.sh       # in the clone that the script is in

A file that is not found stays open: it may set any variable.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from bridge.errors import PayloadError
from bridge.read.launch.shell_word import OPEN_PIECE_PATTERN, ShellWord
from bridge.read.text.document import Document

PARENT_FOLDER_PATTERN = re.compile(
    r"\A\$\(\s*cd\s[^|;]*?/(?P<up>\.\.(?:/\.\.)*)/?[\"']?\s[^|;]*&&\s*pwd[^|;]*\)\Z"
)
"""`$(cd "$(dirname "$0")/../.." && pwd)`, a folder above that of the script."""


def maybe_read_text(file: Path) -> str | None:
    """Return the text of a file; None for a file that cannot be read."""
    try:
        return Document.load(file).text
    except (PayloadError, ValueError):
        return None


def find_named_file(script: str, word: ShellWord) -> Path | None:
    """Return a file that a script names; None if there is no such file.

    Args:
        script: The path of the script.
        word: The file as the script names it. A part that only the run decides is assumed to be the
            folder of the script, or a folder above it.
    """
    known_end: str = word
    open_pieces = [*OPEN_PIECE_PATTERN.finditer(word)]
    if open_pieces:
        known_end = word[open_pieces[-1].end() :].lstrip("/")
    if not known_end or known_end.startswith("~"):
        return None
    if open_pieces:
        parent = PARENT_FOLDER_PATTERN.search(open_pieces[-1][0])
        if parent is not None:
            known_end = f"{parent['up']}/{known_end}"
    if known_end.startswith("/"):
        return _find_in_clone(Path(script), known_end)
    file = Path(script).parent / known_end
    if _is_file(file):
        return file
    return None


def _is_file(path: Path) -> bool:
    """Return whether a path is that of a file. `Path.is_file` raises for a name that is too long."""
    return os.path.isfile(path)  # noqa: PTH113


def _find_in_clone(script: Path, absolute_path: str) -> Path | None:
    """Return the file that `/opt/slime/a/b.sh` is in the clone of the script's repository.

    The clone is the folder above the script whose name is a part of the path, here `slime`.
    """
    parts = Path(absolute_path).parts
    for folder in script.resolve().parents:
        if folder.name and folder.name in parts[1:-1]:
            parts_in_clone = parts[parts.index(folder.name) + 1 :]
            file = folder.joinpath(*parts_in_clone)
            if _is_file(file):
                return file
            return None
    return None
