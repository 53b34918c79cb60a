"""Files that a script writes, and the settings in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bridge.errors import PayloadError
from bridge.interop.launch.launches import bears
from bridge.interop.reading import strict_json

if TYPE_CHECKING:
    from bridge.interop.launch.word import Word

LINES = re.compile("\n")
SCALE = re.compile(r'"(?:enabled|initial_scale_power)"')
STRING = re.compile(r'"(?:[^"\\]|\\.)*"|(__\d+__)')


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """A file that a script writes."""

    line: int
    text: Word | None = None
    """The content; None: a program changes it."""

    @cached_property
    def precise(self) -> tuple[Word, ...]:
        """The lines of its text that bear on precision."""
        lines = self.text.cut(LINES) if self.text is not None else ()
        return tuple(line for line in lines if bears(line) or SCALE.search(line))

    @property
    def note(self) -> str:
        """The name of the file in a report as long as it is not read."""
        return f"heredoc on line {self.line}"


def settings_of(file: WrittenFile, path: str) -> tuple[dict[str, Any], dict[str, str]] | None:
    """Return the settings of a JSON file that a script writes, and those whose values only the run knows.

    The second are texts by their dotted names; None where the script does not write all of it, or it is no JSON.
    """
    if file.text is None:
        return None
    texts = {f"__{place}__": part.text for place, part in enumerate(file.text.parts) if part.variable is not None}
    text = "".join(part.text if part.variable is None else f"__{place}__" for place, part in enumerate(file.text.parts))
    try:
        content = strict_json.loads(STRING.sub(lambda found: f'"{found[1]}"' if found[1] else found[0], text), path)
    except PayloadError:
        return None
    late: dict[str, str] = {}
    return (_known(content, late, "", texts), late) if isinstance(content, dict) else None


def _known(content: dict[str, Any], late: dict[str, str], above: str, texts: dict[str, str]) -> dict[str, Any]:
    """Return the settings that are known, and note the others; `texts` are those of the parts that are not."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            found[key] = _known(value, late, f"{above}{key}.", texts)
        elif any(one in f"{key} {value}" for one in texts):
            late[f"{above}{key}"] = re.sub(r"__\d+__", lambda match: texts.get(match[0], match[0]), str(value))
        else:
            found[key] = value
    return found
