"""The files of a project that can hold a precision, and what is said of those that were not looked at."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bridge.interop.launch.launches import PRECISION_WORDS
from bridge.interop.reading.document import MAX_BYTES

SKIPPED = {"node_modules", "__pycache__", "site-packages", "venv", "env", "build", "dist", "data"}
SKIPPED |= {"outputs", "wandb", "checkpoints"}
SUFFIXES = frozenset(
    {".yaml", ".yml", ".json", ".sh", ".bash", ".slurm", ".sbatch", ".sub", ".slrm", ".py", ".env", ".toml"}
)
MAX_FILES = 5000
MAX_LEVELS = 12
HEAD_BYTES = 1024
"""As much of a file that is too large as is looked at."""
NAMES = re.compile(r"deepspeed|accelerate|fsdp|megatron|(?:^|[_/-])ds[_-]|zero[123]", re.IGNORECASE)
"""Names of configurations that bear on precision, in addition to the words of precision themselves."""
TEST = re.compile(r"(?:conftest|test_.*|.*_test)\.py")
COMMENTS = re.compile(r"(?:^|(?<=\s))#.*", re.MULTILINE)


@dataclass(kw_only=True)
class Files:
    """A walk through a project's folder."""

    root: Path
    limits: list[str] = field(default_factory=list)
    """What the walk left out, one clause each; complete once it has ended."""

    def __iter__(self) -> Iterator[tuple[Path, str]]:
        """Return each file with its name below the root, in the order of the names, files before folders."""
        count, tests, deep, links = 0, 0, 0, 0
        for path, folders, names in os.walk(self.root, onerror=self._refused):
            here = Path(path)
            inside = here.relative_to(self.root)
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in SKIPPED)
            links += sum((here / name).is_symlink() for name in folders)
            if len(inside.parts) >= MAX_LEVELS:
                deep += len(folders)
                folders.clear()
            for name in sorted(names):
                file = here / name
                wanted = name.startswith(".env.") or name == ".env" if name[0] == "." else file.suffix in SUFFIXES
                if not wanted or not file.is_file():
                    continue
                is_test = bool({"test", "tests"} & set(inside.parts)) or TEST.fullmatch(name) is not None
                if file.suffix == ".py" and is_test:
                    tests += 1
                    continue
                count += 1
                if count > MAX_FILES:
                    self.limits.append(f"stopped after {MAX_FILES} files, others may follow: give a smaller folder")
                    return
                yield file, _shown(inside / name)
        if deep:
            self.limits.append(f"folders more than {MAX_LEVELS} levels down were not looked at: {deep}")
        if links:
            self.limits.append(f"folders that are symbolic links were not followed: {links}")
        if tests:
            self.limits.append(f"Python tests were not looked at: {tests}")

    def _refused(self, error: OSError) -> None:
        name = _shown(Path(error.filename).relative_to(self.root))
        self.limits.append(f"{name} cannot be opened: {error.strerror or type(error).__name__}")


def looks_relevant(file: Path, name: str) -> bool:
    """Return whether a file that cannot be read looks as if it had to do with precision; scripts by their text only."""
    try:
        with file.open("rb") as stream:
            data = stream.read(HEAD_BYTES if os.fstat(stream.fileno()).st_size > MAX_BYTES else MAX_BYTES)
    except OSError:
        return True
    text = data.decode("utf-8", errors="replace")
    by_name = file.suffix in (".json", ".yaml", ".yml") and (PRECISION_WORDS.search(name) or NAMES.search(name))
    return bool(by_name) or PRECISION_WORDS.search(COMMENTS.sub("", text)) is not None


def _shown(name: Path) -> str:
    """Return a file's name as any terminal can print it."""
    text = os.fsencode(name).decode(errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)
