"""Files that a script writes, with the settings in them, and files that it sources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from bridge.errors import PayloadError
from bridge.interop.launch.launches import bears
from bridge.interop.launch.script import Script, parse
from bridge.interop.launch.variables import MARK, Unknowns, is_unknown
from bridge.interop.reading import strict_json
from bridge.interop.reading.document import MAX_BYTES

CONFIGURATION = re.compile(r"\.(?:json|ya?ml|toml|cfg|ini|conf)$")
JSON_PIECE = re.compile(rf'"(?:[^"\\]|\\.)*"|{MARK.pattern}')
SCALE = re.compile(r'"(?:enabled|initial_scale_power)"')
MAX_FILES = 64
"""The last ones that a script writes; any other is a file that it does not write."""
MAX_LENGTH = 65_536


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """A file that a script writes."""

    line: int
    text: str | None = None
    """The content; unknown pieces are marked. None: a program changes it."""

    @classmethod
    def added(
        cls, files: Mapping[str, WrittenFile], name: str, text: str | None, line: int, *, append: bool
    ) -> Mapping[str, WrittenFile]:
        """Return the files of a script after a command has put a text into one of them, or at its end."""
        key = str(PurePosixPath(name))
        if text is None and key not in files:
            return files
        if append and text is not None:
            old = files[key].text if key in files else None
            text = None if old is None else f"{old}\n{text}"
        rest = [(other, file) for other, file in files.items() if other != key]
        return {**dict(rest[1 - MAX_FILES :]), key: cls(line=line, text=text[:MAX_LENGTH] if text else None)}

    @cached_property
    def precise(self) -> tuple[str, ...]:
        """The lines of its text that bear on precision."""
        return tuple(line for line in (self.text or "").splitlines() if bears(line) or SCALE.search(line))

    @property
    def note(self) -> str:
        """The name of the file in a report as long as it is not read."""
        return f"heredoc on line {self.line}"


def settings_of(file: WrittenFile, path: str) -> tuple[dict[str, Any], dict[str, str]] | None:
    """Return the settings of a JSON file that a script writes, and those whose values only the run knows.

    The first are without those that the run decides, the second by their dotted names, as they are marked; None
    where the script does not write all of it, or it is no JSON.
    """
    if file.text is None:
        return None
    text = JSON_PIECE.sub(lambda found: found[0] if found[0].startswith('"') else f'"{found[0]}"', file.text)
    try:
        content = strict_json.loads(text, path)
    except PayloadError:
        return None
    if not isinstance(content, dict):
        return None
    late: dict[str, str] = {}
    return _without(content, late, ""), late


def _without(content: dict[str, Any], late: dict[str, str], above: str) -> dict[str, Any]:
    """Return the settings that are known, and note the others."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        name = f"{above}{key}"
        if isinstance(value, dict):
            found[key] = _without(value, late, f"{name}.")
        elif is_unknown(str(value)) or is_unknown(key):
            late[name] = str(value)
        else:
            found[key] = value
    return found


class Sources:
    """A launch script, the files next to it that it sources, and the strings in it that are scripts."""

    def __init__(self, text: str, path: str) -> None:
        self.path = path
        self.unknowns = Unknowns()
        self.script = parse(Unknowns.plain(text), path)
        self._scripts: dict[str, Script] = {}

    def neighbour(self, name: str) -> str | None:
        """Return the text of a file next to the script, None where there is none."""
        rest = MARK.split(name)[-1].lstrip("/") if MARK.search(name) else name
        if not rest or rest.startswith(("/", "~")) or "\0" in rest:
            return None
        path = Path(self.path).parent / rest
        try:
            if not path.is_file() or path.stat().st_size > MAX_BYTES:
                return None
            return Unknowns.plain(path.read_text(encoding="utf-8").replace("\r\n", "\n"))
        except (OSError, ValueError):
            return None

    @property
    def inner(self) -> tuple[Script, ...]:
        """The strings and files that were parsed."""
        return tuple(self._scripts.values())

    def parsed(self, text: str) -> Script:
        """Return the tree of a string or file that is a script; every reading asks for the same ones."""
        if text not in self._scripts:
            self._scripts[text] = parse(text, self.path)
        return self._scripts[text]
