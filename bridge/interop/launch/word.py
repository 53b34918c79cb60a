"""`Word`: a word of a script, whose parts say what only a run decides and which defaults were taken."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_LENGTH = 65_536
"""Of a word: a script that doubles a string forty times is not a launch script."""
BLANKS = re.compile(r"\s+")
EQUALS = re.compile("=")


class Part(NamedTuple):
    """A piece of a word."""

    text: str
    """As the script has it; as it is written where only the run decides it."""
    variable: str | None = None
    """None where the text is known. Otherwise the variable that nothing sets; empty for the output of a command."""
    defaults: tuple[str, ...] = ()
    """Variables that nothing sets, and whose default this is."""

    @property
    def with_nothing_set(self) -> str:
        """The text as bash has it with nothing set; the output of a command becomes a question mark."""
        if self.variable is None:
            return self.text
        return {"": "?", "#": "0"}.get(self.variable, "")


class Word(str):
    """A text with its parts; a piece that only the run decides stands in it as it is written, `$1` say.

    Methods of `str` return plain texts; `cut`, `option` and `joined` keep the parts.
    """

    __slots__ = ("parts",)
    parts: tuple[Part, ...]

    def __new__(cls, parts: str | Iterable[Part] = "") -> Word:
        """Return a word of parts, or a known one."""
        pieces = [Part(parts)] if isinstance(parts, str) else _merged(parts)
        made = super().__new__(cls, "".join(part.text for part in pieces))
        made.parts = tuple(pieces)
        return made

    @property
    def is_unknown(self) -> bool:
        """Whether only the run decides a piece of it."""
        return any(part.variable is not None for part in self.parts)

    @property
    def defaults(self) -> dict[str, None]:
        """Variables whose defaults are in it."""
        return {name: None for part in self.parts for name in part.defaults}

    @property
    def names(self) -> set[str]:
        """Variables that nothing sets and that are in it, or whose defaults are."""
        return {*self.defaults, *(part.variable for part in self.parts if part.variable)}

    @property
    def with_nothing_set(self) -> str:
        """The text as bash has it with nothing set."""
        return "".join(part.with_nothing_set for part in self.parts)

    @property
    def variable(self) -> str:
        """The variable that nothing sets and that it is, or whose default it is; empty for any other word."""
        names = {part.defaults[0] if part.defaults else part.variable for part in self.parts}
        return (names.pop() or "") if len(names) == 1 and (self.defaults or len(self.parts) == 1) else ""

    @property
    def is_unset(self) -> bool:
        """Whether it consists of variables that nothing sets."""
        return self.is_unknown and not self.with_nothing_set

    def cut(self, pattern: re.Pattern[str]) -> list[Word]:
        """Return the words between the matches of a pattern in what is known of it."""
        found: list[list[Part]] = [[]]
        for part in self.parts:
            texts = pattern.split(part.text) if part.variable is None else [part.text]
            found[-1].append(part._replace(text=texts[0]))
            found += [[part._replace(text=text)] for text in texts[1:]]
        return [Word(parts) for parts in found]

    def option(self) -> tuple[Word, Word | None]:
        """Return name and value of `name=value`; None for the value where no sign is known."""
        name, *rest = self.cut(EQUALS)
        return name, joined(rest, "=") if rest else None

    def with_value(self, variable: str, value: str) -> Word:
        """Return the word with a value in the place of a variable that nothing sets, and of its default."""
        if all(part.variable != variable and variable not in part.defaults for part in self.parts):
            return self
        parts: list[Part] = []
        for part in self.parts:
            if part.variable != variable and variable not in part.defaults:
                parts.append(part)
            elif not parts or parts[-1] != Part(value):
                parts.append(Part(value))
        return Word(parts)

    def because(self, name: str) -> Word:
        """Return the word as the default of a variable."""
        return Word(part._replace(defaults=(name, *part.defaults)) for part in self.parts or (Part(""),))


def joined(words: Iterable[Word], sign: str = " ") -> Word:
    """Return several words as one."""
    words = list(words)
    if len(words) == 1:
        return words[0]
    parts: list[Part] = []
    for word in words:
        parts += [Part(sign), *word.parts] if parts else word.parts
    return Word(parts)


def fields(pieces: Iterable[tuple[Iterable[Word], bool]]) -> list[Word]:
    """Return the words that bash makes of pieces side by side; the second of each: are they split at blanks?"""
    found: list[list[Part]] = []
    goes_on = False
    for words, is_split in pieces:
        for number, word in enumerate(words):
            for place, run in enumerate(word.cut(BLANKS) if is_split else [word]):
                goes_on = goes_on and not number and not place
                if is_split and not run:
                    continue
                if goes_on:
                    found[-1] += run.parts
                else:
                    found.append([*run.parts])
                goes_on = True
    return [Word(parts) for parts in found]


def _merged(parts: Iterable[Part]) -> list[Part]:
    """Return parts with known neighbours of the same defaults as one, not longer than a word may be."""
    found: list[Part] = []
    length = 0
    for part in parts:
        length += len(part.text)
        if length > MAX_LENGTH:
            break
        last = found[-1] if found else None
        if last is not None and part.variable is None and last.variable is None and part.defaults == last.defaults:
            found[-1] = last._replace(text=last.text + part.text)
        elif part.text or part.defaults:
            found.append(part)
    return found
