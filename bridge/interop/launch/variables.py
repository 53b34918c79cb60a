"""`Variables`: what bash knows at one point of a script, and the words that it makes of it."""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING

from bridge.interop.launch.script import LATE, WORDS, text_of
from bridge.interop.launch.word import DEFAULT, FIELD, UNKNOWN, Word, glued, variable_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tree_sitter import Node

MAX_WORDS = 20_000
BEFORE_A_NODE = re.compile(rb"(?:\s|\\\n)*")
PARAMETER = re.compile(r"\$\{([!#]?)(\w+|[@*#?$!-])?(?:\[([^\]\n]*)\])?(:?[-=+?]|[^\w}])?")
"""`${name[index]operator...`, with the sign before the name."""
DEFAULTS = (":-", "-", ":=", "=")
PLAIN = frozenset({"word", "number", "variable_name"})

Pieces = list[str | None]
"""Pieces of words; None stands between two words."""


class Variables:
    """Variables at one point of a script."""

    def __init__(self, stated: Mapping[str, str]) -> None:
        self.stated = stated
        """Variables that are set from outside; they hold where the script sets one to what only the run decides."""
        self.values = {name: [value] for name, value in stated.items()}
        """The words of each variable; an array may have any number, another variable has one."""

    def set(self, name: str, words: list[str], *, append: bool = False, is_array: bool = False) -> None:
        """Set a variable, or add to it."""
        old = self.values.get(name, [])
        if append and is_array:
            words = [*(old if any(old) or len(old) > 1 else ()), *words]
        elif append:
            words = [glued([*old[:1], *words]), *old[1:]]
        elif name in self.stated and any(map(UNKNOWN.search, words)):
            words = split(self.stated[name]) if is_array else [self.stated[name]]
        self.values[name] = words[:MAX_WORDS]

    def text(self, node: Node) -> str:
        """Return a word as one text: as in an assignment, without splitting."""
        return glued(" " if piece is None else piece for piece in self._pieces(node, is_split=False))

    def words(self, nodes: Iterable[Node]) -> list[str]:
        """Return what several words become."""
        found: list[str] = []
        for node in nodes:
            runs = groupby(self._pieces(node, is_split=True), lambda piece: piece is None)
            found += [glued(run) for is_end, run in runs if not is_end]
            if len(found) > MAX_WORDS:
                break
        return found[:MAX_WORDS]

    def _pieces(self, node: Node, *, is_split: bool, is_quoted: bool = False) -> Pieces:
        """Return the pieces of a word, whose values are split at blanks or not; `is_quoted`: it stands in quotes."""
        kind, start = node.type, _start(node)
        own = text_of(node)[start - node.start_byte :]
        if kind in LATE:
            return [own]
        if kind in ("simple_expansion", "expansion"):
            return self._expansion(node, own, start, is_split=is_split, is_quoted=is_quoted)
        if kind == "raw_string":
            return [own[1:-1]]
        if kind == "string":
            inside = self._stretch(node, start + 1, node.end_byte - 1, is_split=False, is_quoted=True)
            return inside if len(own) > 2 else [""]
        is_quoted |= kind == "heredoc_body"
        return self._stretch(node, node.start_byte, node.end_byte, is_split=is_split, is_quoted=is_quoted)

    def _stretch(self, node: Node, start: int, end: int, *, is_split: bool, is_quoted: bool) -> Pieces:
        source, base, found = node.text or b"", node.start_byte, Pieces()
        for child in node.children:
            if child.type in WORDS and child.type not in PLAIN and start <= child.start_byte and child.end_byte <= end:
                found += _literal(source[start - base : _start(child) - base], is_quoted=is_quoted)
                found += self._pieces(child, is_split=is_split, is_quoted=is_quoted)
                start = child.end_byte
            if len(found) > MAX_WORDS:
                break
        return found + _literal(source[start - base : end - base], is_quoted=is_quoted)

    def _expansion(self, node: Node, own: str, start: int, *, is_split: bool, is_quoted: bool) -> Pieces:
        """Return the pieces of `$name` and `${name...}`; in quotes `${A[@]}` and `$@` stay several words."""
        sign, name, index, operator, argument = "", own[1:], "", "", ""
        if node.type == "expansion":
            found = PARAMETER.match(own)
            if found is None or not found[2]:
                return [own]
            sign, name, index, operator = found.groups("")
            begin = start + len(found[0].encode())
            rest = self._stretch(node, begin, node.end_byte - 1, is_split=False, is_quoted=is_quoted)
            argument = glued(" " if piece is None else piece for piece in rest)
        values = self._value(own, name, index.strip("\"'"), sign or operator, argument)
        if not is_split and "@" not in (index, name):
            return [" ".join(values)]
        pieces = Pieces()
        for value in values:
            pieces += [None] if pieces else []
            for place, field in enumerate(split(value) if is_split else [value]):
                pieces += [None, field] if place else [field]
        return pieces

    def _value(self, own: str, name: str, index: str, operator: str, argument: str) -> list[str]:
        """Return the words of a parameter, which is one unless it is a list; `own` is it as it is written."""
        held = self.values.get(name)
        if held is not None and not {index, name} & {"@", "*"}:
            held = held[:1]
        text = " ".join(held or ())
        is_unset = held is None or bool(text and not Word.of(text).with_nothing_set)
        if index not in ("", "@", "*") or operator not in ("", ":?", "?", *DEFAULTS):
            return [own]
        if operator not in DEFAULTS:
            return [own] if held is None else held
        if not (is_unset or (operator[0] == ":" and not text)):
            return held or []
        default = f"${{{variable_of(text) or name}:-{argument}}}"
        if operator[-1] == "=":
            self.set(name, [default])
        return [default]


def split(text: str) -> list[str]:
    """Return the words of a text that bash splits at blanks, each of a default with its variable."""
    if not any(mark in text for mark in "$`<>"):
        return text.split()

    def spread(found: re.Match[str]) -> str:
        return " ".join(f"${{{found[1]}:-{field}}}" for field in split(found[2])) if " " in found[2] else found[0]

    fields = (found[0] for found in FIELD.finditer(DEFAULT.sub(spread, text)))
    return [field for field in fields if Word.of(field)]


def _literal(source: bytes, *, is_quoted: bool) -> Pieces:
    text = source.decode().replace("\\\n", "")
    if "\\" in text:
        text = re.sub(r"\\([\"\\$`])" if is_quoted else r"(?s)\\(.)", r"\1", text)
    return [text] if text else []


def _start(node: Node) -> int:
    """Return where a node begins; the grammar counts blanks before an expansion inside a string to it."""
    found = BEFORE_A_NODE.match(node.text or b"")
    return node.start_byte + (found.end() if found is not None else 0)
