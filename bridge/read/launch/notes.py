"""`Note`: a part of a script that was not read, with its kind."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class NoteKind(Enum):
    """The kind of a part that was not read. Other modules decide by the kind, never by the text."""

    SOURCED_FILE = "a file that the script sources"
    STRAY_OPTIONS = "a line of options without a command"
    HERE_DOCUMENT = "a here-document about precision"
    BROKEN_LINE = "a line that the grammar does not know"
    OTHER_PART = "another part of the script"


@dataclass(frozen=True, slots=True)
class Note:
    """A part of a script that was not read."""

    noun: str
    """The part as messages name it. For a sourced file it is the name as the script writes it."""
    kind: NoteKind = NoteKind.OTHER_PART

    def __str__(self) -> str:
        if self.kind is NoteKind.SOURCED_FILE:
            return f"source {self.noun}"
        return self.noun
