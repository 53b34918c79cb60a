"""`ShellWord`: a word of a script as text, which may have pieces that only the run decides.

    word = ShellWord.from_text("--fp8-format=${FORMAT:-hybrid}")
    str(word)          # "--fp8-format=hybrid"
    word.defaults      # {"FORMAT": "hybrid"}: the environment may replace it
    ShellWord.from_text("--lr=$LR").is_open    # True

The variables that the script sets are already expanded. Any other piece stays as it is written,
such as `$1` and `$(date)`. The regular expressions below describe such a piece. Parentheses and
braces are matched to a depth of four, since a regular expression cannot count them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_WORD_LENGTH = 65_536
"""Characters of a word that are kept. A script that doubles a string forty times would fill the
memory."""
BRACES_REGEX = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*+\})*+\})*+\}"
_PARENTHESES_REGEX = r"\((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*+\))*+\))*+\))*+\)"
DEFAULT_PATTERN = re.compile(
    rf"\$(?={BRACES_REGEX})\{{(\w+|[@*]):?[-=]((?:[^{{}}]|{BRACES_REGEX})*+)\}}"
)
"""`${name:-default}`: its variable and its default."""
DEFERRED_REGEX = rf"(?:\$(?:{BRACES_REGEX}|{_PARENTHESES_REGEX}|'[^']*'|[{{(])|[<>]{_PARENTHESES_REGEX}|`[^`]*+`)"
OPEN_PIECE_PATTERN = re.compile(rf"\$(\w+|[@*#])|\$\{{(\w+|[@*#])\}}|{DEFERRED_REGEX}")
"""A piece that only the run decides. The first or second group is its variable, if the piece is a
plain variable."""
UNKNOWN_VARIABLE = "$_"
"""A variable that only the run knows, in the place of a text that is not read."""
UNKNOWN_OUTPUT = "?"
"""The text that stands for the output of a command, so that it is not empty."""
FIELD_PATTERN = re.compile(rf"(?:{DEFERRED_REGEX}|\S)+")
"""A text without blanks, except for blanks inside a deferred piece."""


class ShellWord(str):
    """A word of a command, with its defaults in place.

    Methods of `str` return plain texts, without the defaults.
    """

    __slots__ = ("defaults",)
    defaults: Mapping[str, str]
    """Variable whose default is in the word -> the default."""

    def __new__(cls, text: str = "", defaults: Mapping[str, str] | None = None) -> ShellWord:
        """Return a word with the defaults that are in it."""
        word = super().__new__(cls, text)
        word.defaults = defaults or {}
        return word

    @classmethod
    def from_text(cls, text: str) -> ShellWord:
        """Return a text of a script as a word: each `${NAME:-default}` becomes its default."""
        defaults: dict[str, str] = {}
        match = DEFAULT_PATTERN.search(text)
        while match is not None:
            start = match.start()
            defaults[match[1]] = match[2]
            text = join_texts([text[:start], match[2], text[match.end() :]])
            match = DEFAULT_PATTERN.search(text, start)
        return cls(text, defaults)

    @property
    def is_open(self) -> bool:
        """Whether only the run decides a piece of the word."""
        return OPEN_PIECE_PATTERN.search(self) is not None

    @property
    def text_when_unset(self) -> str:
        """The text that bash expands the word to with nothing set.

        A variable is empty, and `$#` is 0. The output of a command is not known, and becomes a
        question mark, so that it is not empty.
        """
        unset = {"": UNKNOWN_OUTPUT, "#": "0"}
        return OPEN_PIECE_PATTERN.sub(lambda piece: unset.get(piece[1] or piece[2] or "", ""), self)

    def split_option(self) -> tuple[ShellWord, ShellWord | None]:
        """Return name and value of `name=value`; the value is None for a word without `=`."""
        name, sign, value = self.partition("=")
        if not sign:
            return ShellWord(name), None
        return ShellWord(name), ShellWord(value)


def get_variable_name(text: str) -> str:
    """Return NAME for the texts `$NAME`, `${NAME}` and `${NAME:-default}`; empty for any other text."""
    match = DEFAULT_PATTERN.fullmatch(text) or OPEN_PIECE_PATTERN.fullmatch(text)
    if match is None:
        return ""
    return match[1] or match[2] or ""


def format_default(name: str, default: str) -> str:
    """Return `${name:-default}`: the default, and the variable that may replace it."""
    return f"${{{name}:-{default}}}"


def split_words(text: str) -> list[str]:
    """Return the words of a text that bash splits at blanks.

    A default with blanks, `${A:-x y}`, becomes a word for each of its words: `${A:-x} ${A:-y}`. So
    each word still names the variable that may replace it.
    """
    if not any(mark in text for mark in "$`<>"):
        return text.split()
    with_split_defaults = DEFAULT_PATTERN.sub(_split_default, text)
    fields = [match[0] for match in FIELD_PATTERN.finditer(with_split_defaults)]
    return [field for field in fields if ShellWord.from_text(field)]


def _split_default(default: re.Match[str]) -> str:
    """Return `${A:-x y}` as `${A:-x} ${A:-y}`."""
    name, text = default[1], default[2]
    if " " not in text:
        return default[0]
    return " ".join(format_default(name, field) for field in split_words(text))


def join_words(words: Iterable[ShellWord]) -> ShellWord:
    """Return several words as one word, with blanks between them."""
    words = list(words)
    defaults: dict[str, str] = {}
    for word in words:
        defaults.update(word.defaults)
    return ShellWord(" ".join(words), defaults)


def join_texts(texts: Iterable[str | None]) -> str:
    """Return texts joined without a separator; None counts as empty.

    A text that is too long is cut. Only the run knows its rest.
    """
    text = "".join(filter(None, texts))
    if len(text) > MAX_WORD_LENGTH:
        return text[:MAX_WORD_LENGTH] + UNKNOWN_VARIABLE
    return text
