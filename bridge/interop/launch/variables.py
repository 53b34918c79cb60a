"""`Variables`: the variables at one point of a script, and the expansion of its words.

A piece of a text that only a run decides is a mark: a number between two private characters. `Unknowns` has its text.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bridge.interop.launch.script import LATE, WORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tree_sitter import Node

    from bridge.interop.launch.script import Script


BEGIN, END = "\ue000", "\ue001"
MARK = re.compile(f"{BEGIN}(\\d+){END}")
UNPRINTABLE = "\ufffd"
MAX_LENGTH = 65_536
"""Of a variable: a script that doubles a string forty times is not a launch script."""
MAX_WORDS = 20_000
MAX_WORK = 20_000_000
"""Characters that one script may expand to."""
NAME = re.compile(r"\$\{?(\w+)(?::?\?[^}]*)?\}?")
BLANKS = re.compile(rb"(?:\s|\\\n)*")
IN_HEREDOC = re.compile(r"\$(\w+)|\$\{(\w+)(?:(:?[-=])([^{}]*))?\}|\$\([^()]*\)|`[^`]*`|\\([$`\\])")
ESCAPES = {"n": "\n", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
PLAIN = frozenset({"word", "number", "variable_name"})
NAMED = PLAIN | {"special_variable_name"}

Value = str | list[str]
"""Of a variable: a text, or the words of an array."""
Piece = tuple[list[str], bool]
"""Texts of a word's piece, and whether they are split at blanks."""


def is_unknown(text: str) -> bool:
    """Return whether a piece of the text is decided only when the script runs."""
    return BEGIN in text


def name_of(text: str) -> str:
    """Return the variable that a text is: `$X`, `${X}`; empty: it is none."""
    found = NAME.fullmatch(text)
    return found[1] if found else ""


class Unknowns:
    """The unknown pieces of one script."""

    def __init__(self) -> None:
        self.sources: list[str] = []
        self.known: dict[str, str] = {}
        self.unset: set[str] = set()
        """Numbers of the marks that stand for variables which nothing sets."""
        self.work = 0

    @staticmethod
    def plain(text: str) -> str:
        """Return a text without the characters that mark unknown pieces."""
        return text.replace(BEGIN, UNPRINTABLE).replace(END, UNPRINTABLE)

    def mark(self, source: str, *, is_unset: bool = False) -> str:
        """Return the mark of an unknown piece."""
        source = self.shown(source)
        if source not in self.known:
            self.known[source] = f"{BEGIN}{len(self.sources)}{END}"
            if is_unset:
                self.unset.add(str(len(self.sources)))
            self.sources.append(source)
        return self.known[source]

    def shown(self, text: str) -> str:
        """Return the text with each mark as it was written."""
        return MARK.sub(lambda found: self.sources[int(found[1])], text) if BEGIN in text else text

    def with_nothing_set(self, text: str) -> str:
        """Return the text as bash has it with nothing set; the output of a command becomes a question mark."""
        return MARK.sub(self._nothing, text) if BEGIN in text else text

    def _nothing(self, found: re.Match[str]) -> str:
        if self.sources[int(found[1])] == "$#":
            return "0"
        return "" if found[1] in self.unset else "?"

    def is_unset(self, text: str) -> bool:
        """Return whether a text is only variables that nothing sets."""
        return BEGIN in text and not self.with_nothing_set(text)


class Variables:
    """Variables at one point of a script.

    Args:
        unknowns: Shared by all readings of the script.
        stated: What the user states of the run; it holds where the script sets a variable to something unknown.
        assumed: Values of variables that nothing sets, for the reading of another branch.
        open_: A variable that is read as unknown although the script has a default for it.
    """

    def __init__(
        self, unknowns: Unknowns, stated: Mapping[str, str], assumed: Mapping[str, str], open_: str = ""
    ) -> None:
        self.unknowns, self.stated, self.assumed, self.open = unknowns, stated, assumed, open_
        self.values: dict[str, Value] = dict(stated)
        self.defaulted: dict[str, str] = {}
        """Variables that nothing sets and whose `${name:-default}` was taken."""
        self.soft: set[str] = set()
        """Variables that another run may set otherwise: from a default, or a loop."""
        self.taken = 0
        """How often a default or a soft variable was read."""

    def mark(self, source: str, *, is_unset: bool = False) -> str:
        """Return the mark of an unknown piece; of a variable whose value is assumed, that value."""
        name = name_of(source) if self.assumed and is_unset else ""
        return self.assumed[name] if name in self.assumed else self.unknowns.mark(source, is_unset=is_unset)

    def set(self, name: str, value: Value, *, append: bool = False, soft: bool = False) -> None:
        """Set a variable, or add to it."""
        old = self.values.get(name)
        if append and isinstance(value, list):
            if isinstance(old, str):
                old = [old] if old else []
            value = [*(old or []), *value]
        elif append and isinstance(value, str):
            value = [f"{old[0]}{value}", *old[1:]] if isinstance(old, list) and old else f"{old or ''}{value}"
        elif name in self.stated and (soft or any(map(is_unknown, value))):
            value = self.stated[name] if isinstance(value, str) else self.stated[name].split()
            soft = False
        self.values[name] = value[:MAX_LENGTH] if isinstance(value, str) else value[:MAX_WORDS]
        if soft:
            self.soft.add(name)
        elif not append:
            self.soft.discard(name)

    def text(self, script: Script, node: Node) -> str:
        """Return a word as one text: as in an assignment, without splitting."""
        return "".join(" ".join(items) for items, _ in self._pieces(script, node))[:MAX_LENGTH]

    def words(self, script: Script, nodes: Iterable[Node]) -> list[str]:
        """Return what several words become."""
        found: list[str] = []
        for node in nodes:
            goes_on = False
            for items, is_split in self._pieces(script, node):
                pieces, ends = items, False
                if is_split:
                    text = " ".join(items)
                    pieces, ends = text.split(), text[-1:].isspace()
                    goes_on = goes_on and not text[:1].isspace()
                if goes_on and pieces:
                    found[-1] += pieces[0]
                found += pieces[goes_on:]
                goes_on = (goes_on or bool(pieces)) and not ends
                if len(found) > MAX_WORDS:
                    return found[:MAX_WORDS]
        return found

    def heredoc(self, body: str) -> str:
        """Return a here-document with its variables expanded."""
        return IN_HEREDOC.sub(self._in_heredoc, body)[:MAX_LENGTH]

    def _in_heredoc(self, found: re.Match[str]) -> str:
        if found[5]:
            return found[5]
        name = found[1] or found[2]
        if not name:
            return self.mark(found[0])
        return " ".join(self._value(found[0], name, "", found[3] or "", lambda: found[4]))

    def _pieces(self, script: Script, node: Node, *, quoted: bool = False) -> list[Piece]:
        kind, start = node.type, _start(script, node)
        own = script.source[start : node.end_byte].decode()
        if kind in LATE:
            return [([self.mark(own)], not quoted)]
        if kind == "simple_expansion":
            return [self._listed(self._value(own, own[1:], "", "", str), own[1:], "", quoted)]
        if kind == "expansion":
            return [self._expansion(script, node, own, quoted=quoted)]
        if kind == "raw_string":
            return [([own[1:-1]], False)]
        if kind == "ansi_c_string":
            return [([re.sub(r"\\(.)", lambda found: ESCAPES.get(found[1], found[0]), own[2:-1])], False)]
        if kind in ("string", "translated_string"):
            inner = node.children[-1] if kind == "translated_string" and node.children else node
            start += len(own) - len(own.lstrip("$")) + 1
            return self._stretch(script, inner, start, node.end_byte - 1, quoted=True) or [([""], False)]
        return self._stretch(script, node, node.start_byte, node.end_byte, quoted=quoted)

    def _stretch(self, script: Script, node: Node, start: int, end: int, *, quoted: bool) -> list[Piece]:
        """Return a stretch of a node: its expansions and strings, and what stands between them as text."""
        found: list[Piece] = []
        for child in node.children:
            if child.type in WORDS and child.type not in PLAIN and start <= child.start_byte and child.end_byte <= end:
                found += _literal(script.source[start : _start(script, child)], quoted=quoted)
                found += self._pieces(script, child, quoted=quoted)
                start = child.end_byte
        return found + _literal(script.source[start:end], quoted=quoted)

    def _expansion(self, script: Script, node: Node, own: str, *, quoted: bool) -> Piece:
        name, index, operator, rest = "", "", "", node.end_byte
        for child in node.children[1:-1]:
            if not name and child.type in ("!", "#") and not child.is_named:
                operator = f"{child.type}name"
            elif not name and child.type in NAMED:
                name = script.text(child)
            elif not name and child.type == "subscript":
                name, _, index = script.text(child).partition("[")
                index = index.rstrip("]").strip("\"'")
            elif name and not operator:
                operator, rest = script.text(child), child.end_byte

        def argument() -> str:
            pieces = self._stretch(script, node, rest, node.end_byte - 1, quoted=quoted)
            return "".join(" ".join(items) for items, _ in pieces)

        return self._listed(self._value(own, name, index, operator, argument), name, index, quoted)

    @staticmethod
    def _listed(items: list[str], name: str, index: str, quoted: bool) -> Piece:
        """Return the words of a parameter: in quotes `${A[@]}` and `$@` stay several, all others are one."""
        if quoted and "@" not in (index, name):
            items = [" ".join(items)]
        return items, not quoted

    def _value(self, own: str, name: str, index: str, operator: str, argument: Callable[[], str]) -> list[str]:
        """Return the words of a parameter, which is one unless it is a list.

        `own` is the parameter as it is written; `operator` is `:-`, `%`, ..., or `!name` and `#name` for a sign
        before the name.
        """
        value = self.values.get(name)
        self.unknowns.work += len(value) if value is not None else 1
        if self.unknowns.work > MAX_WORK:
            return [""]
        self.taken += name in self.soft
        if operator in ("#name", "!name"):
            is_known = operator == "#name" and value is not None and (isinstance(value, list) or not is_unknown(value))
            return [str(len(value or ""))] if is_known else [self.mark(own)]
        if isinstance(value, str):
            value = [value] if index in ("", "0", "@", "*") else [self.mark(own)]
        elif value is not None and not {index, name} & {"@", "*"}:
            place = int(index or 0) if (index or "0").isdigit() else len(value)
            value = value[place : place + 1] or (None if place else [])
        text = "".join(value or ())
        is_unset = value is None or self.unknowns.is_unset(text)
        if operator in (":-", "-", ":=", "="):
            if not name or not (is_unset or (operator[0] == ":" and not text)):
                return value or []
            default = self._default(name_of(self.unknowns.shown(text)) or name, argument())
            if operator[-1] == "=" and not index:
                self.set(name, default, soft=True)
            return [default]
        if operator in (":+", "+"):
            return [] if is_unset or not text else [argument()]
        is_plain = operator in ("", ":?", "?")
        return value if is_plain and value is not None else [self.mark(own, is_unset=is_plain)]

    def _default(self, name: str, value: str) -> str:
        """Return the default of a variable that nothing sets, and note that it was taken."""
        if name == self.open:
            return self.mark(f"${name}", is_unset=True)
        self.defaulted.setdefault(name, value)
        self.taken += 1
        return value


def _start(script: Script, node: Node) -> int:
    """Return where a node begins; the grammar counts blanks before an expansion inside a string to it."""
    found = BLANKS.match(script.source, node.start_byte, node.end_byte)
    return found.end() if found is not None else node.start_byte


def _literal(source: bytes, *, quoted: bool) -> list[Piece]:
    text = source.decode().replace("\\\n", "")
    if "\\" in text:
        text = re.sub(r"\\([\"\\$`])" if quoted else r"(?s)\\(.)", r"\1", text)
    return [([text], False)] if text else []
