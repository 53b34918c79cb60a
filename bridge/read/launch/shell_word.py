"""`ShellWord`: a word of a script as a text, with pieces that only the run decides.

    word = Word.of("--fp8-format=${FORMAT:-hybrid}")
    str(word)          # "--fp8-format=hybrid"
    word.defaults      # {"FORMAT": "hybrid"}: the environment may replace it
    Word.of("--lr=$LR").is_unknown    # True

A variable that the script sets is expanded before. A piece that it does not set stands as it is
written: `$1` is nothing or a word of the run, and `$(date)` the output of a command.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_WORD_LENGTH = 65_536
"""Of a word: a script that doubles a string forty times is not a launch script."""
BRACES_REGEX = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*+\})*+\})*+\}"
_PARENTHESES_REGEX = r"\((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*+\))*+\))*+\))*+\)"
DEFAULT_PATTERN = re.compile(
    rf"\$(?={BRACES_REGEX})\{{(\w+|[@*]):?[-=]((?:[^{{}}]|{BRACES_REGEX})*+)\}}"
)
"""`${name:-default}`: its variable and its default."""
DEFERRED_REGEX = rf"(?:\$(?:{BRACES_REGEX}|{_PARENTHESES_REGEX}|'[^']*'|[{{(])|[<>]{_PARENTHESES_REGEX}|`[^`]*+`)"
UNKNOWN_PATTERN = re.compile(rf"\$(\w+|[@*#])|\$\{{(\w+|[@*#])\}}|{DEFERRED_REGEX}")
"""A piece that only the run decides, with its variable where it is no more than that."""
FIELD_PATTERN = re.compile(rf"(?:{DEFERRED_REGEX}|\S)+")
"""A text between blanks."""


class ShellWord(str):
    """A word of a command as it is shown; methods of `str` return plain texts."""

    __slots__ = ("defaults",)
    defaults: Mapping[str, str]
    """Variable whose default is in the word -> the default."""

    def __new__(cls, text: str = "", defaults: Mapping[str, str] | None = None) -> ShellWord:
        """Return a word with the defaults that are in it."""
        made = super().__new__(cls, text)
        made.defaults = defaults or {}
        return made

    @classmethod
    def from_text(cls, text: str) -> ShellWord:
        """Return the text of a script with its defaults in place."""
        defaults: dict[str, str] = {}
        match = DEFAULT_PATTERN.search(text)
        while match is not None:
            start = match.start()
            defaults[match[1]] = match[2]
            text = join_texts([text[:start], match[2], text[match.end() :]])
            match = DEFAULT_PATTERN.search(text, start)
        return cls(text, defaults)

    @property
    def is_unknown(self) -> bool:
        """Whether only the run decides a piece of the word."""
        return UNKNOWN_PATTERN.search(self) is not None

    @property
    def text_when_unset(self) -> str:
        """The text as bash has it with nothing set.

        The output of a command becomes a question mark.
        """
        unset = {"": "?", "#": "0"}
        return UNKNOWN_PATTERN.sub(lambda piece: unset.get(piece[1] or piece[2] or "", ""), self)

    def option(self) -> tuple[ShellWord, ShellWord | None]:
        """Return name and value of `name=value`; None for the value where there is no sign."""
        name, sign, value = self.partition("=")
        if not sign:
            return ShellWord(name), None
        return ShellWord(name), ShellWord(value)


def get_variable_name(text: str) -> str:
    """Return the variable that a text is, or whose default a text is; empty for any other text."""
    match = DEFAULT_PATTERN.fullmatch(text) or UNKNOWN_PATTERN.fullmatch(text)
    if match is None:
        return ""
    return match[1] or match[2] or ""


def join_words(words: Iterable[ShellWord]) -> ShellWord:
    """Return several words as a single word."""
    words = list(words)
    defaults: dict[str, str] = {}
    for word in words:
        defaults.update(word.defaults)
    return ShellWord(" ".join(words), defaults)


def join_texts(texts: Iterable[str | None]) -> str:
    """Return texts side by side."""
    return "".join(filter(None, texts))[:MAX_WORD_LENGTH]
