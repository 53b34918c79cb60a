"""`Variables`: what bash knows at one point of a script, and the words that it makes of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bridge.interop.launch.script import LATE, WORDS, text_of
from bridge.interop.launch.word import Part, Word, fields, joined

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tree_sitter import Node

MAX_WORDS = 20_000
BLANKS = re.compile(rb"(?:\s|\\\n)*")
PARAMETER = re.compile(r"\$\{([!#]?)(\w+|[@*#?$!-])?(?:\[([^\]\n]*)\])?(:?[-=+?]|[^\w}])?")
"""`${name[index]operator...`, with the sign before the name."""
SIMPLE = re.compile(r"[\w.,:/=+-]+")
"""A text that means the same inside a string that is a script."""
PIECE = re.compile(r"\$\{(__\d+__)\}")
PLAIN = frozenset({"word", "number", "variable_name"})

Piece = tuple[list[Word], bool]
"""The words of a piece of a word, several of an array, and whether they are split at blanks."""


class Variables:
    """Variables at one point of a script."""

    def __init__(self, stated: Mapping[str, Word]) -> None:
        self.stated = dict(stated)
        """Variables that the user states; they hold where the script sets one to what only the run decides."""
        self.values = {name: [value] for name, value in stated.items()}
        """The words of each variable; an array may have any number, another variable has one."""
        self.defaulted: dict[str, Word] = {}
        """Variables that nothing sets, and the default that was taken."""
        self.asked: set[str] = set()
        """Variables that nothing sets, and without which a condition was answered or a word made."""
        self.pieces: dict[Part, str] = {}
        """Pieces of strings that are scripts, which are more than their text -> the variable that holds each."""

    def set(self, name: str, words: list[Word], *, append: bool = False, is_array: bool = False) -> None:
        """Set a variable, or add to it."""
        old = self.values.get(name, [])
        if append and is_array:
            words = [*(old if any(old) or len(old) > 1 else ()), *words]
        elif append:
            words = [joined([*old[:1], *words], ""), *old[1:]]
        elif name in self.stated and any(word.defaults or word.is_unknown for word in words):
            words = fields([([self.stated[name]], True)]) if is_array else [self.stated[name]]
        self.values[name] = words[:MAX_WORDS]

    def assume(self, name: str, value: str) -> None:
        """State a variable that nothing has set before; what was made of it, or of its default, becomes the value."""
        self.stated[name] = Word(value)
        for key, words in self.values.items():
            self.values[key] = [word.with_value(name, value) for word in words]
        self.values.setdefault(name, [Word(value)])

    def text(self, node: Node) -> Word:
        """Return a word as one text: as in an assignment, without splitting."""
        return Word(part for words, _ in self._pieces(node) for part in joined(words).parts)

    def script(self, text: Word) -> str:
        """Return a text that is a script; a piece that is more than its text stands in it as a variable."""
        source = ""
        for part in text.parts:
            if part.variable is None and not (part.defaults and SIMPLE.fullmatch(part.text)):
                source += part.text
            else:
                name = self.pieces.setdefault(part, f"__{len(self.pieces)}__")
                self.values.setdefault(name, [Word([part])])
                source += f"${{{name}}}"
        return source

    def literal(self, text: str) -> Word:
        """Return a text in which only the pieces of a string that is a script are expanded."""
        found = list[Part]()
        for place, piece in enumerate(PIECE.split(text)):
            found += joined(self.values.get(piece, ())).parts if place % 2 else [Part(piece)]
        return Word(found)

    def words(self, nodes: Iterable[Node]) -> list[Word]:
        """Return what several words become."""
        found: list[Word] = []
        for node in nodes:
            found += fields(self._pieces(node))
            if len(found) > MAX_WORDS:
                break
        return found[:MAX_WORDS]

    def _pieces(self, node: Node, *, quoted: bool = False) -> list[Piece]:
        kind, start = node.type, _start(node)
        own = text_of(node)[start - node.start_byte :]
        if kind in LATE:
            return [([Word([Part(str(self.literal(own)), "")])], not quoted)]
        if kind == "simple_expansion":
            return [self._listed(self._value(own, own[1:], "", "", Word()), own[1:], quoted=quoted)]
        if kind == "expansion":
            return [self._expansion(node, own, start, quoted=quoted)]
        if kind == "raw_string":
            return [([self.literal(own[1:-1])], False)]
        if kind == "string":
            return self._stretch(node, start + 1, node.end_byte - 1, quoted=True) or [([Word()], False)]
        return self._stretch(node, node.start_byte, node.end_byte, quoted=quoted or kind == "heredoc_body")

    def _stretch(self, node: Node, start: int, end: int, *, quoted: bool) -> list[Piece]:
        """Return a stretch of a node: its expansions and strings, and what stands between them as text."""
        source, base, found = node.text or b"", node.start_byte, list[Piece]()
        for child in node.children:
            if child.type in WORDS and child.type not in PLAIN and start <= child.start_byte and child.end_byte <= end:
                found += _literal(source[start - base : _start(child) - base], quoted=quoted)
                found += self._pieces(child, quoted=quoted)
                start = child.end_byte
            if len(found) > MAX_WORDS:
                break
        return found + _literal(source[start - base : end - base], quoted=quoted)

    def _expansion(self, node: Node, own: str, start: int, *, quoted: bool) -> Piece:
        found = PARAMETER.match(own)
        if found is None or not found[2]:
            return [Word([Part(str(self.literal(own)), "")])], not quoted
        sign, name, index, operator = found.groups("")
        rest = self._stretch(node, start + len(found[0].encode()), node.end_byte - 1, quoted=quoted)
        argument = joined((joined(words) for words, _ in rest), "")
        value = self._value(own, name, index.strip("\"'"), sign or operator, argument)
        return self._listed(value, index or name, quoted=quoted)

    @staticmethod
    def _listed(words: list[Word], index: str, *, quoted: bool) -> Piece:
        """Return the words of a parameter: in quotes `${A[@]}` and `$@` stay several, all others are one."""
        return (words if not quoted or index == "@" else [joined(words)]), not quoted

    def _value(self, own: str, name: str, index: str, operator: str, argument: Word) -> list[Word]:
        """Return the words of a parameter, which is one unless it is a list; `own` is it as it is written."""
        held = self.values.get(name)
        if held is not None and not {index, name} & {"@", "*"}:
            place = int(index or 0) if (index or "0").isdigit() else len(held)
            held = held[place : place + 1] or (None if place else [])
        text = joined(held or (), "")
        is_unset = held is None or text.is_unset
        if operator in (":-", "-", ":=", "="):
            if not (is_unset or (operator[0] == ":" and not text)):
                return held or []
            variable = text.variable or name
            self.defaulted.setdefault(variable, argument)
            self.asked |= text.names - {variable}
            default = argument.because(variable)
            if operator[-1] == "=" and not index:
                self.set(name, [default])
            return [default]
        if operator in (":+", "+"):
            self.asked |= text.names or {name}
            return [] if is_unset or not text else [argument]
        if operator not in ("", ":?", "?"):
            return [Word([Part(str(self.literal(own)), "")])]
        return held if held is not None else [Word([Part(own, name)])]


def _literal(source: bytes, *, quoted: bool) -> list[Piece]:
    text = source.decode().replace("\\\n", "")
    if "\\" in text:
        text = re.sub(r"\\([\"\\$`])" if quoted else r"(?s)\\(.)", r"\1", text)
    return [([Word(text)], False)] if text else []


def _start(node: Node) -> int:
    """Return where a node begins; the grammar counts blanks before an expansion inside a string to it."""
    found = BLANKS.match(node.text or b"")
    return node.start_byte + (found.end() if found is not None else 0)
