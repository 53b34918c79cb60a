"""The files of a project that can hold a precision, and the parts of its folder that were not looked at."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bridge.precision.strict_yaml import MAX_BYTES
from bridge.read.launch.launches import PRECISION_WORDS
from bridge.read.text.document import SUFFIXES

MAX_FILES = 5000
HEAD_BYTES = 1024
"""As much of a file that is too large as is looked at."""
TEST = re.compile(r"(?:.*/)?(?:tests?/.*|conftest|test_[^/]*|[^/]*_test)\.py")
COMMENTS = re.compile(r"(?:^|(?<=\s))#.*", re.MULTILINE)


def files_in(root: Path, skipped: list[str], limits: list[str]) -> Iterator[tuple[Path, str]]:
    """Yield each file with its name below the root, in the order of the names, files before folders.

    Folders named in `skipped`, and hidden ones, are passed over. `limits` takes a clause for each part left out.
    """

    def refuse(error: OSError) -> None:
        name = _printable(Path(error.filename).relative_to(root))
        limits.append(f"{name} cannot be opened: {error.strerror or type(error).__name__}")

    left_out, taken = Counter[str](), 0
    for path, folders, names in os.walk(root, onerror=refuse):
        here = Path(path)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skipped)
        left_out["folders that are symbolic links were not followed"] += sum(
            (here / name).is_symlink() for name in folders
        )
        for file in (here / name for name in sorted(names)):
            is_wanted = file.suffix in SUFFIXES if not file.name.startswith(".") else file.name.startswith(".env")
            if not is_wanted or not file.is_file():
                continue
            if TEST.fullmatch(file.relative_to(root).as_posix()):
                left_out["Python tests were not looked at"] += 1
                continue
            taken += 1
            if taken > MAX_FILES:
                limits.append(f"stopped after {MAX_FILES} files, others may follow: give a smaller folder")
                return
            yield file, _printable(file.relative_to(root))
    limits += [f"{clause}: {count}" for clause, count in left_out.items() if count]


def _printable(name: Path) -> str:
    """Return a file's name as any terminal can print it."""
    text = os.fsencode(name).decode(errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def looks_relevant(file: Path) -> bool:
    """Return whether a file that cannot be read holds words of precision outside of comments, or cannot be opened."""
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError:
        return True
    text = data[: HEAD_BYTES if len(data) > MAX_BYTES else None].decode("utf-8", errors="replace")
    return PRECISION_WORDS.search(COMMENTS.sub("", text)) is not None
