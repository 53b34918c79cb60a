"""What a shell script is made of below the level of commands: parts, words and tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Part", "Token", "Word"]


@dataclass(slots=True)
class Part:
    """A piece of a word."""

    kind: str
    """text, parameter or command."""
    text: str
    """The text, the parameter's name, or the command's source."""
    quoted: bool = False
    index: str = ""
    """`[@]`, `[0]`, ... of an array."""
    operator: str = ""
    """`:-`, `:+`, `#`, ... of `${name:-word}`."""
    argument: Word | None = None
    source: str = ""
    """As it is written."""


@dataclass(slots=True)
class Word:
    """One word, as written."""

    parts: list[Part] = field(default_factory=list)
    start: int = 0
    end: int = 0

    @property
    def literal(self) -> str | None:
        """The word where it is plain, unquoted text: what can be a reserved word."""
        if len(self.parts) == 1 and self.parts[0].kind == "text" and not self.parts[0].quoted:
            return self.parts[0].text
        return "" if not self.parts else None


@dataclass(slots=True)
class Token:
    """What a parser reads: a word, an operator, an array, a test, arithmetic, a redirection, or a line's end."""

    kind: str
    text: str
    start: int
    end: int
    word: Word | None = None
    words: list[Word] = field(default_factory=list)
    """Elements of an array, or the words of `[[ ]]`."""
    body: Word | None = None
    """A heredoc's text."""
