"""`Variables`: what bash knows at one point of a script, and the words that it makes of it."""

from __future__ import annotations

import re
from itertools import groupby, islice
from typing import TYPE_CHECKING

from bridge.read.launch.arithmetic import computed
from bridge.read.launch.script import text_of
from bridge.read.launch.word import BRACES, DEFAULT, FIELD, LATE, UNKNOWN, Word, glued, variable_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tree_sitter import Node

MAX_WORDS = 20_000
_REST = rf"(?P<parameter>\$(?:\w+|[@*#]|{BRACES}))|(?P<late>{LATE})|(?P<plain>[^'\"\\$`<>]+|.)"
_QUOTES = rf"'(?P<raw>[^']*)'|\"(?P<string>(?:\\.|{LATE}|[^\"\\])*+)\""
IN_QUOTES = re.compile(rf"\\(?P<escaped>[\"\\$`\n])|{_REST}", re.DOTALL)
PIECES = re.compile(rf"\\(?P<escaped>.)|{_QUOTES}|{_REST}", re.DOTALL)
"""The pieces of a word, in quotes and outside."""
PARAMETER = re.compile(r"\$\{([!#]?)(\w+|[@*#?$!-])?(?:\[([^\]\n]*)\])?(:?[-=+?]|[^\w}])?")
"""`${name[index]operator...`, with the sign before the name."""
HEREDOC = re.compile(
    r"\$\(\s*cat\s*<<\s*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)\n(?P<text>(?:.*\n)*?)(?P=end)\s*\)"
)
"""`$(cat <<EOF ...)`, whose output is its own text."""
JOINED = re.compile(
    r"""\$\(\s*IFS=(['"])(?P<sign>[^'"$`\\\n])[^'"$`\\\n]*\1\s*;\s*echo\s+"\$\{(?P<name>\w+)\[\*\]\}"\s*\)"""
)
"""`$(IFS=', '; echo "${array[*]}")`, whose output is the elements with the first sign between them."""
DEFAULTS = (":-", "-", ":=", "=")


class Variables:
    """Variables at one point of a script."""

    def __init__(self, stated: Mapping[str, str]) -> None:
        self.stated = stated
        """Variables that are set from outside; they hold where the script sets one to what only the run decides."""
        self.values = {name: {0: value} for name, value in stated.items()}
        """The elements of each variable by their index; one that is no array has the element 0. They are never changed,
        only replaced, so that a copy of the mapping is a copy of all variables. No element: known to be unset."""

    def held(self, name: str) -> list[str]:
        """Return the elements of a variable in their order; none for one that nothing sets."""
        return [*self.values.get(name, {}).values()]

    def set(
        self, name: str, words: Sequence[str], *, append: bool = False, is_array: bool = False
    ) -> None:
        """Set a variable, or add to it; a text that is no array becomes the element 0, as in bash."""
        old = self.values.get(name, {})
        first = 0
        if append and is_array:
            first = max(old, default=-1) + 1
            words = words[: MAX_WORDS - len(old)]
        elif append:
            words = [glued([old.get(0), *words])]
        elif name in self.stated and any(map(UNKNOWN.search, words)):
            words = split(self.stated[name]) if is_array else [self.stated[name]]
        kept = {} if is_array and not append else old
        self.values[name] = {**kept, **dict(enumerate(words[:MAX_WORDS], first))}

    def set_element(self, name: str, index: str, text: str, *, append: bool = False) -> None:
        """Set one element of an array, or add to it; the whole array is unknown where the index is no plain number."""
        elements = dict(self.values.get(name, {}))
        if not index.isdecimal():
            self.forget(name)
            return
        place = int(index)
        if append:
            text = glued([elements.get(place), text])
        elements[place] = text
        self.values[name] = dict(sorted(elements.items()))

    def forget(self, name: str) -> None:
        """Make a variable one that only the run knows."""
        if name in self.values:
            self.set(name, [f"${name}"], is_array=True)

    def text(self, node: Node) -> str:
        """Return a word as one text: as in an assignment, without splitting."""
        return self._text(text_of(node).lstrip())

    def _text(self, word: str, *, is_quoted: bool = False) -> str:
        pieces = islice(self._pieces(word, is_split=False, is_quoted=is_quoted), MAX_WORDS)
        return glued(" " if piece is None else piece for piece in pieces)

    def words(self, nodes: Iterable[Node]) -> list[str]:
        """Return what several words become."""
        return self.words_of(text_of(node).lstrip() for node in nodes)

    def words_of(self, texts: Iterable[str]) -> list[str]:
        """Return what several words become, each as it is written."""
        found: list[str] = []
        for text in texts:
            pieces = islice(self._pieces(text, is_split=True), MAX_WORDS)
            runs = groupby(pieces, lambda piece: piece is None)
            found += [glued(run) for is_end, run in runs if not is_end]
            if len(found) > MAX_WORDS:
                break
        return found[:MAX_WORDS]

    def _pieces(
        self, word: str, *, is_split: bool, is_quoted: bool = False
    ) -> Iterator[str | None]:
        """Yield the pieces of a word, whose values are split at blanks or not; None stands between two words."""
        for found in (IN_QUOTES if is_quoted else PIECES).finditer(word):
            kind = str(found.lastgroup)
            piece = found[kind]
            if kind == "parameter":
                yield from self._expansion(piece, is_split=is_split, is_quoted=is_quoted)
            elif kind == "string" and piece:
                yield from self._pieces(piece, is_split=False, is_quoted=True)
            elif kind == "late":
                yield from self._late(piece, is_split=is_split)
            else:
                yield piece.removeprefix("\n") if kind == "escaped" else piece

    def _late(self, piece: str, *, is_split: bool) -> Iterator[str | None]:
        """Yield the pieces of `$((A + B))` of constants and of `$(cat <<EOF ...)`; any other piece as it is written."""
        value = computed(piece, self.values)
        shown = None if is_split else HEREDOC.fullmatch(piece)
        array = JOINED.fullmatch(piece)
        if array is not None and array["name"] in self.values and not is_split:
            yield array["sign"].join(self.held(array["name"]))
            return
        if shown is not None and shown["quote"]:
            yield shown["text"].rstrip("\n")
        elif shown is not None:
            yield from self._pieces(shown["text"].rstrip("\n"), is_split=False, is_quoted=True)
        else:
            yield piece if value is None else value

    def _expansion(self, own: str, *, is_split: bool, is_quoted: bool) -> Iterator[str | None]:
        """Yield the pieces of `$name` and `${name...}`; in quotes `${A[@]}` and `$@` stay several words."""
        sign, name, index, operator, argument = "", own[1:], "", "", ""
        if own.startswith("${"):
            found = PARAMETER.match(own)
            sign, name, index, operator = (
                found.groups("") if found is not None else ("", "", "", "")
            )
            argument = (
                self._text(own[found.end() : -1], is_quoted=is_quoted) if found is not None else ""
            )
        values = (
            self._value(own, name, index.strip("\"'"), sign or operator, argument)
            if name
            else [own]
        )
        if not is_split and "@" not in (index, name):
            values = [" ".join(values)]
        for place, value in enumerate(values):
            if place:
                yield None
            yield from self._fields(value, name) if is_split else [value]

    def _fields(self, value: str, name: str) -> Iterator[str | None]:
        """Yield the words of a value that is not in quotes, with None at its blanks."""
        if self._is_separated(value):
            yield f"${name}"  # IFS splits it at other signs than blanks
            return
        if value[:1].isspace():
            yield None
        for place, field in enumerate(split(value)):
            if place:
                yield None
            yield field
        if value[-1:].isspace():
            yield None

    def _is_separated(self, value: str) -> bool:
        """Return whether the script splits a value in another way than at blanks."""
        separators = "".join(self.held("IFS"))
        if not separators or variable_of(separators) or separators in (" \t\n", "$' \\t\\n'"):
            return False  # with `IFS=$OLD_IFS` a script restores it
        return any(char.isspace() or char in separators for char in value)

    def _value(self, own: str, name: str, index: str, operator: str, argument: str) -> list[str]:
        """Return the words of a parameter, which is one unless it is a list; `own` is it as it is written."""
        elements = self.values.get(name)
        if index not in ("", "@", "*") or operator not in ("", ":?", "?", *DEFAULTS):
            return [own]
        held = None if elements is None else [*elements.values()]
        if elements is not None and not {index, name} & {"@", "*"}:
            held = [elements[0]] if 0 in elements else []
        text = " ".join(held or ())
        is_unset = held is None or bool(text and not Word.of(text).with_nothing_set)
        if operator not in DEFAULTS:
            return [own] if held is None else held
        if held == [] and name not in ("@", "*"):  # the script has unset it
            if operator[-1] == "=":
                self.set(name, [argument])
            return [argument]
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
        return (
            " ".join(f"${{{found[1]}:-{field}}}" for field in split(found[2]))
            if " " in found[2]
            else found[0]
        )

    fields = (found[0] for found in FIELD.finditer(DEFAULT.sub(spread, text)))
    return [field for field in fields if Word.of(field)]
