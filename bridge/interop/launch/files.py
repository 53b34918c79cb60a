"""Files that a script writes: what it puts into them, or what it has a program make them from."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from bridge.errors import PayloadError
from bridge.interop import strict_json
from bridge.interop.launch.relevance import bears
from bridge.interop.launch.values import MARK, is_unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["CONFIGURATION", "Files", "WrittenFile", "settings_of"]

CONFIGURATION = re.compile(r"\.(?:json|ya?ml|toml|cfg|ini|conf)$")
TEMPLATE = re.compile(r"[^\s;{}]*(?:\.(?:json|ya?ml|toml|cfg|ini|conf|tmpl|tpl|j2|in)|template[^/]*)", re.IGNORECASE)
JSON_PIECE = re.compile(rf'"(?:[^"\\]|\\.)*"|{MARK.pattern}')
SCALE = re.compile(r'"(?:enabled|initial_scale_power)"')
MAX_FILES = 64
"""The last ones that a script writes; any other is a file that it does not write."""
MAX_LENGTH = 65_536
MOVERS = frozenset({"cp", "mv"})


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """A file that a script writes."""

    line: int
    text: str | None = None
    """What it puts into it; unknown pieces are marked. None: a program puts it there."""
    sources: tuple[str, ...] = ()
    """Files that the program makes it from; its own name: it is edited."""
    defaulted: Mapping[str, str] = field(default_factory=dict)
    """Variables whose default in the script decides about the precision that it asks for."""

    @cached_property
    def precise(self) -> tuple[str, ...]:
        """The lines of its text that bear on precision."""
        return tuple(line for line in (self.text or "").splitlines() if bears(line) or SCALE.search(line))

    @property
    def note(self) -> str:
        """What a report calls it as long as nobody reads it."""
        return f"heredoc on line {self.line}"

    def made(self, name: str) -> str:
        """Return where it comes from, as a clause; empty where nothing says it."""
        if [_key(source) for source in self.sources] == [_key(name)]:
            return f"the script edits it on line {self.line}"
        return f"the script makes it from {' and '.join(self.sources)}" if self.sources else ""


class Files:
    """The files that a script has written so far, by their names.

    Args:
        shown: Turns the marks of a text back into what was written.
    """

    def __init__(self, shown: Callable[[str], str]) -> None:
        self.shown = shown
        self.known: Mapping[str, WrittenFile] = {}
        """Never changed, so that all who know them can share it."""

    def precise(self) -> dict[str, tuple[str, ...]]:
        """Return the lines that bear on precision, by the names of their files."""
        return {name: file.precise for name, file in self.known.items() if file.precise}

    def _keep(self, key: str, file: WrittenFile) -> None:
        rest = {name: known for name, known in self.known.items() if name != key}
        self.known = {**dict(list(rest.items())[1 - MAX_FILES :]), key: file}

    def get(self, name: str) -> WrittenFile | None:
        """Return the file of this name, None where the script writes none."""
        return self.known.get(_key(self.shown(name)))

    def write(
        self,
        name: str,
        text: str,
        line: int,
        *,
        append: bool = False,
        defaulted: Mapping[str, str] | None = None,
    ) -> None:
        """Put a text, which depends on defaults, into a file or at its end."""
        key = _key(self.shown(name))
        old = self.known.get(key)
        about = dict(defaulted or {})
        if append:
            text = f"{old.text}\n{text}" if old is not None and old.text is not None else ""
            about = {**(old.defaulted if old is not None else {}), **about}
        self._keep(key, WrittenFile(line=line, text=text[:MAX_LENGTH] or None, defaulted=about))

    def make(self, names: Iterable[str], sources: Iterable[Sequence[str]], line: int) -> None:
        """Note that programs, by their words, make files."""
        found = [word for words in sources for word in map(self.shown, words[1:]) if TEMPLATE.fullmatch(word)]
        for name in map(self.shown, names):
            if CONFIGURATION.search(name):
                others = tuple(dict.fromkeys(one for one in found if _key(one) != _key(name)))
                self._keep(_key(name), WrittenFile(line=line, sources=others))

    def run(self, words: Sequence[str], line: int) -> None:
        """Note what a command does to files by itself: `sed -i`, `cp`, `mv`."""
        paths = [self.shown(word) for word in words[1:] if not word.startswith("-")]
        if words[0] == "sed" and any(re.match(r"-\w*i|--in-place", word) for word in words[1:]):
            for path in paths:
                if CONFIGURATION.search(path) and not re.match(r"s(\W).*\1", path):
                    self._keep(_key(path), WrittenFile(line=line, sources=(path,)))
        elif words[0] in MOVERS and len(paths) == 2:
            source, target = paths
            if not CONFIGURATION.search(target):
                target = f"{target}/{PurePosixPath(source).name}"
            if CONFIGURATION.search(target):
                made = WrittenFile(line=line, sources=(source,))
                self._keep(_key(target), self.known.get(_key(source), made))


def settings_of(file: WrittenFile, path: str) -> tuple[dict[str, Any], dict[str, str]] | None:
    """Return the settings of a JSON file that a script writes, and those whose values only the run knows.

    Args:
        file: The file.
        path: What it is called in messages.

    Returns:
        The settings without those that the run decides, and these by their dotted names, as they are marked; None
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


def _key(name: str) -> str:
    return str(PurePosixPath(name))
