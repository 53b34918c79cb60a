"""`find_named_file`: a file that a script names, found next to the script; `find_file_text`, its text.

source "$(dirname "$0")/../models/qwen3.sh"     # by the known end of the path
source /opt/slime/scripts/models/qwen3.sh       # in the clone that the script lies in
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from bridge.errors import PayloadError
from bridge.read.launch.shell_word import UNKNOWN_PATTERN, ShellWord
from bridge.read.text.document import Document

PARENT_FOLDER_PATTERN = re.compile(
    r"\A\$\(\s*cd\s[^|;]*?/(?P<up>\.\.(?:/\.\.)*)/?[\"']?\s[^|;]*&&\s*pwd[^|;]*\)\Z"
)
"""`$(cd "$(dirname "$0")/../.." && pwd)`, a folder above that of the script."""


def find_file_text(script: str, word: ShellWord) -> str | None:
    """Return the text of a file that a script names; None where there is no such file."""
    file = find_named_file(script, word)
    if file is None:
        return None
    return maybe_read_text(file)


def maybe_read_text(file: Path) -> str | None:
    """Return the text of a file; None for one that cannot be read."""
    try:
        return Document.load(file).text
    except (PayloadError, ValueError):
        return None


def find_named_file(script: str, word: ShellWord) -> Path | None:
    """Return a file that a script names; None where there is no such file.

    Args:
        script: The path of the script.
        word: The file as the script names it. A part that only the run decides is taken for the
            folder of the script, or for one above it.
    """
    name: str = word
    unknown = [*UNKNOWN_PATTERN.finditer(word)]
    if unknown:
        name = word[unknown[-1].end() :].lstrip("/")
    if not name or name.startswith("~"):
        return None
    if unknown:
        above = PARENT_FOLDER_PATTERN.search(unknown[-1][0])
        if above is not None:
            name = f"{above['up']}/{name}"
    if name.startswith("/"):
        return _find_in_clone(Path(script), name)
    file = Path(script).parent / name
    if _is_file(file):
        return file
    return None


def _is_file(path: Path) -> bool:
    """Return whether a path is that of a file. `Path.is_file` raises for a name that is too long."""
    return os.path.isfile(path)  # noqa: PTH113


def _find_in_clone(script: Path, name: str) -> Path | None:
    """Return the file of an absolute path (`/opt/slime/a/b.sh`) in the clone of a script.

    The clone is the folder around the script whose name is a part of the path.
    """
    parts = Path(name).parts
    for folder in script.resolve().parents:
        if folder.name and folder.name in parts[1:-1]:
            rest = parts[parts.index(folder.name) + 1 :]
            file = folder.joinpath(*rest)
            if _is_file(file):
                return file
            return None
    return None
