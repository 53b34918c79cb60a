"""`World`: the state of bash at one point of a script on one path through its branches, and the words made there."""

from __future__ import annotations

import re
from copy import copy
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from bridge.interop.launch.files import WrittenFile
from bridge.interop.launch.launches import Launch
from bridge.interop.launch.script import LATE, WORDS
from bridge.interop.launch.word import Part, Word, fields, joined

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tree_sitter import Node

    from bridge.interop.launch.launches import TrainingCommand
    from bridge.interop.launch.script import Script

MAX_WORDS = 20_000
BLANKS = re.compile(rb"(?:\s|\\\n)*")
ESCAPES = {"n": "\n", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
PLAIN = frozenset({"word", "number", "variable_name"})
NAMED = PLAIN | {"special_variable_name"}

Piece = tuple[list[Word], bool]
"""The words of a piece of a word, several of an array, and whether they are split at blanks."""


@dataclass(kw_only=True, eq=False)
class World:
    """Variables, functions and files at one point of a script, and what was started before it."""

    stated: Mapping[str, Word]
    """Variables that the user states; they hold where the script sets one to what only the run decides."""
    values: dict[str, list[Word]]
    """The words of each variable; an array may have any number, another variable has one."""
    exported: dict[str, Word] = field(default_factory=dict)
    functions: dict[str, tuple[Script, Node]] = field(default_factory=dict)
    files: dict[str, WrittenFile] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    executed: list[int] = field(default_factory=list)
    """Nodes of the commands that were read."""
    defaulted: dict[str, Word] = field(default_factory=dict)
    """Variables that nothing sets, and the default that was taken."""
    stray: list[Word] = field(default_factory=list)
    """Options that stand where a command should."""
    status: bool | None = None
    """Whether the last command succeeded; None: only the run decides it."""
    ended: bool = False
    number: int = 0
    """How many commands were read before it began."""
    label: str = ""
    """The branch that it takes otherwise than the first path; empty for that, and where it is not to be listed."""
    taken: str = ""
    """The branch that the first path takes there."""
    because: tuple[str, ...] = ()
    """The variables whose defaults decide there for the first path."""
    forced: dict[str, bool] = field(default_factory=dict)
    """Conditions that hold on it, or do not."""
    rest: tuple[int, int] | None = None
    """Where it came together with the first path: numbers of that one's launches and commands."""

    @property
    def is_first(self) -> bool:
        """Whether it takes the branches that bash takes with nothing set."""
        return not self.taken

    def fork(self, label: str) -> World:
        """Return a copy for another path."""
        made = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict | list):
                setattr(made, name, value.copy())
        made.label = label
        return made

    def assume(self, name: str, value: str) -> None:
        """Set a variable that nothing sets, also where its name or its default was taken before."""
        part = Part(value)
        self.values = {key: [word.replaced(name, part) for word in words] for key, words in self.values.items()}
        self.exported = {key: word.replaced(name, part) for key, word in self.exported.items()}
        self.files = {key: file.replaced(name, part) for key, file in self.files.items()}
        self.values.setdefault(name, [Word(value)])

    def is_like(self, other: World) -> bool:
        """Return whether what follows is the same on two paths."""
        names = ("values", "exported", "functions", "files", "notes", "ended")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def start(self, line: int, command: TrainingCommand, prefix: Mapping[str, Word]) -> None:
        """Note a launch."""
        self.launches.append(
            Launch(
                line=line,
                program=command.program,
                arguments=tuple(command.arguments),
                runner=tuple(command.runner),
                environment={**self.exported, **prefix},
                files=self.files.copy(),
                place=sum(one.line == line for one in self.launches),
            )
        )

    def write(self, name: Word, text: Word | None, line: int) -> None:
        """Note a file that a command writes, without a text one that it changes."""
        key = str(PurePosixPath(name))
        if text is not None or key in self.files:
            self.files.pop(key, None)
            self.files[key] = WrittenFile(line=line, text=text)

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

    def text(self, script: Script, node: Node) -> Word:
        """Return a word as one text: as in an assignment, without splitting."""
        return Word(part for words, _ in self._pieces(script, node) for part in joined(words).parts)

    def words(self, script: Script, nodes: Iterable[Node]) -> list[Word]:
        """Return what several words become."""
        found: list[Word] = []
        for node in nodes:
            found += fields(self._pieces(script, node))
            if len(found) > MAX_WORDS:
                break
        return found[:MAX_WORDS]

    def _pieces(self, script: Script, node: Node, *, quoted: bool = False) -> list[Piece]:
        kind, start = node.type, _start(script, node)
        own = script.source[start : node.end_byte].decode()
        if kind in LATE:
            return [([Word([Part(own, "")])], not quoted)]
        if kind == "simple_expansion":
            return [self._listed(self._value(own, own[1:], "", "", Word()), own[1:], quoted=quoted)]
        if kind == "expansion":
            return [self._expansion(script, node, own, quoted=quoted)]
        if kind == "heredoc_body":
            return self._stretch(script, node, node.start_byte, node.end_byte, quoted=True)
        if kind == "raw_string":
            return [([script.known(own[1:-1])], False)]
        if kind == "ansi_c_string":
            return [([script.known(re.sub(r"\\(.)", lambda found: ESCAPES.get(found[1], found[0]), own[2:-1]))], False)]
        if kind in ("string", "translated_string"):
            inner = node.children[-1] if kind == "translated_string" and node.children else node
            start += len(own) - len(own.lstrip("$")) + 1
            return self._stretch(script, inner, start, node.end_byte - 1, quoted=True) or [([Word()], False)]
        return self._stretch(script, node, node.start_byte, node.end_byte, quoted=quoted)

    def _stretch(self, script: Script, node: Node, start: int, end: int, *, quoted: bool) -> list[Piece]:
        """Return a stretch of a node: its expansions and strings, and what stands between them as text."""
        found: list[Piece] = []
        for child in node.children:
            if child.type in WORDS and child.type not in PLAIN and start <= child.start_byte and child.end_byte <= end:
                found += _literal(script, start, _start(script, child), quoted=quoted)
                found += self._pieces(script, child, quoted=quoted)
                start = child.end_byte
            if len(found) > MAX_WORDS:
                break
        return found + _literal(script, start, end, quoted=quoted)

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
        argument = self._stretch(script, node, rest, node.end_byte - 1, quoted=quoted)
        value = self._value(own, name, index, operator, joined((joined(words) for words, _ in argument), ""))
        return self._listed(value, index or name, quoted=quoted)

    @staticmethod
    def _listed(words: list[Word], index: str, *, quoted: bool) -> Piece:
        """Return the words of a parameter: in quotes `${A[@]}` and `$@` stay several, all others are one."""
        return (words if not quoted or index == "@" else [joined(words)]), not quoted

    def _value(self, own: str, name: str, index: str, operator: str, argument: Word) -> list[Word]:
        """Return the words of a parameter, which is one unless it is a list.

        `own` is the parameter as it is written; `operator` is `:-`, `%`, ..., or `!name` and `#name` for a sign
        before the name.
        """
        held = self.values.get(name)
        if held is not None and not {index, name} & {"@", "*"}:
            place = int(index or 0) if (index or "0").isdigit() else len(held)
            held = held[place : place + 1] or (None if place else [])
        text = joined(held or (), "")
        is_unset = held is None or text.is_unset
        if operator in (":-", "-", ":=", "="):
            if not name or not (is_unset or (operator[0] == ":" and not text)):
                return held or []
            default = self._default(text.variable or name, argument)
            if operator[-1] == "=" and not index:
                self.set(name, [default])
            return [default]
        if operator in (":+", "+"):
            return [] if is_unset or not text else [argument.because(*text.defaults)]
        if operator not in ("", ":?", "?"):
            return [Word([Part(own, "")])]
        return held if held is not None else [Word([Part(own, name)])]

    def _default(self, name: str, value: Word) -> Word:
        """Return the default of a variable that nothing sets, and note that it was taken."""
        self.defaulted.setdefault(name, value)
        return value.because(name)


def _start(script: Script, node: Node) -> int:
    """Return where a node begins; the grammar counts blanks before an expansion inside a string to it."""
    found = BLANKS.match(script.source, node.start_byte, node.end_byte)
    return found.end() if found is not None else node.start_byte


def _literal(script: Script, start: int, end: int, *, quoted: bool) -> list[Piece]:
    text = script.source[start:end].decode().replace("\\\n", "")
    if "\\" in text:
        text = re.sub(r"\\([\"\\$`])" if quoted else r"(?s)\\(.)", r"\1", text)
    return [([script.known(text)], False)] if text else []
