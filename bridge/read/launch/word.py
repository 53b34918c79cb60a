"""Words of a script as texts: what the script sets is expanded, and what it does not set stands as it is written.

`$1` is nothing or what the run gives, `$(date)` the output of a command, `${X:-bf16}` a default that the environment
may replace. `Word` is such a text as it is shown: with its defaults in place, and their variables by name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_LENGTH = 65_536
"""Of a word: a script that doubles a string forty times is not a launch script."""
BRACES = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*+\})*+\})*+\}"
_PARENTHESES = r"\((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*+\))*+\))*+\))*+\)"
DEFAULT = re.compile(rf"\$(?={BRACES})\{{(\w+|[@*]):?[-=]((?:[^{{}}]|{BRACES})*+)\}}")
"""Variable and default."""
LATE = rf"(?:\$(?:{BRACES}|{_PARENTHESES}|'[^']*'|[{{(])|[<>]{_PARENTHESES}|`[^`]*+`)"
UNKNOWN = re.compile(rf"\$(\w+|[@*#])|\$\{{(\w+|[@*#])\}}|{LATE}")
"""A piece that only the run decides, with its variable where it is no more than that."""
FIELD = re.compile(rf"(?:{LATE}|\S)+")
"""A text between blanks."""


class Word(str):
    """A word of a command as it is shown; methods of `str` return plain texts."""

    __slots__ = ("defaults",)
    defaults: Mapping[str, str]
    """Variables whose defaults are in it, with these."""

    def __new__(cls, text: str = "", defaults: Mapping[str, str] | None = None) -> Word:
        """Return a word with the defaults that are in it."""
        made = super().__new__(cls, text)
        made.defaults = defaults or {}
        return made

    @classmethod
    def of(cls, text: str) -> Word:
        """Return the text of a script with its defaults in place."""
        defaults, place = dict[str, str](), 0
        while (found := DEFAULT.search(text, place)) is not None:
            place = found.start()
            defaults[found[1]] = found[2]
            text = glued([text[:place], found[2], text[found.end() :]])
        return cls(text, defaults)

    @property
    def is_unknown(self) -> bool:
        """Whether only the run decides a piece of it."""
        return UNKNOWN.search(self) is not None

    @property
    def with_nothing_set(self) -> str:
        """The text as bash has it with nothing set; the output of a command becomes a question mark."""
        unset = {"": "?", "#": "0"}
        return UNKNOWN.sub(lambda found: unset.get(found[1] or found[2] or "", ""), self)

    def option(self) -> tuple[Word, Word | None]:
        """Return name and value of `name=value`; None for the value where there is no sign."""
        name, sign, value = self.partition("=")
        return Word(name), Word(value) if sign else None


def variable_of(text: str) -> str:
    """Return the variable that nothing sets and that a text is, or whose default it is; empty for any other text."""
    found = DEFAULT.fullmatch(text) or UNKNOWN.fullmatch(text)
    return (found[1] or found[2] or "") if found is not None else ""


def joined(words: Iterable[Word]) -> Word:
    """Return several words as one."""
    words = list(words)
    return Word(
        " ".join(words), {name: text for word in words for name, text in word.defaults.items()}
    )


def glued(texts: Iterable[str | None]) -> str:
    """Return texts side by side."""
    return "".join(filter(None, texts))[:MAX_LENGTH]
