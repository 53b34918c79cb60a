"""`State`: what bash knows at one point of a script, and what it started before."""

from __future__ import annotations

import re
from copy import copy
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from bridge.interop.launch.launches import PRECISION_WORDS, Launch, WrittenFile
from bridge.interop.launch.script import WORDS, redirects, targets, text_of
from bridge.interop.launch.variables import Variables
from bridge.interop.launch.word import Word, joined

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tree_sitter import Node

NAME = re.compile(r"[A-Za-z_]\w*")
CONFIGURATIONS = (".json", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".conf")


@dataclass(frozen=True, kw_only=True)
class Fork:
    """A condition that is answered otherwise than by bash with nothing set."""

    place: int = 0
    """Which one it is in the script, from 1; 0: none, in the first state."""
    label: str = ""
    """The branch that is taken there; empty where it is not to be listed."""
    taken: str = ""
    """The branch that is taken with nothing set."""
    because: tuple[str, ...] = ()
    """The variables whose defaults decide there."""


class State(Variables):
    """What bash knows at a point of a script, and what was started before."""

    def __init__(self, stated: Mapping[str, Word], fork: Fork) -> None:
        super().__init__(stated)
        self.fork = fork
        self.answers: dict[str, bool] = {}
        """Conditions whose answers are assumed."""
        self.exported: dict[str, Word] = {}
        self.functions: dict[str, Node] = {}
        self.files: dict[str, WrittenFile] = {}
        self.launches: list[Launch] = []
        self.notes: dict[str, None] = {}
        self.executed: set[int] = set()
        """Nodes of the commands that were read."""
        self.stray: list[Word] = []
        """Options that stand where a command should."""
        self.has_failed = False
        """The last command was `false`, or a condition that did not hold."""
        self.has_ended = False

    def parted(self, fork: Fork) -> State:
        """Return another state that is as this one up to here."""
        made = copy(self)
        made.fork = fork
        for name, held in vars(self).items():
            if isinstance(held, dict | list | set):
                setattr(made, name, held.copy())
        return made

    def restore(self, names: Iterable[str], before: Mapping[str, list[Word]]) -> None:
        """Give variables the values that they had before."""
        for name in names:
            self.values.pop(name, None)
            if name in before:
                self.values[name] = before[name]

    def expanded(self, node: Node) -> list[Word]:
        """Return the words of a command, those behind a redirection too."""
        words: list[Word] = []
        for child in () if node.type == "variable_assignment" else node.children:
            if child.type == "command_name" or child.type in WORDS:
                words += self.words(child.children[:1] if child.type == "command_name" else [child])
            elif child.type in ("=", "==") or (not child.is_named and child.type != "$"):
                words.append(Word(text_of(child)))
        return words + self.words(one for redirect in redirects(node) for one in targets(redirect)[1:])

    def assigned(self, node: Node) -> dict[str, Word]:
        """Set the variables of a command, and return them."""
        found = {}
        for one in [node] if node.type == "variable_assignment" else node.children:
            if one.type != "variable_assignment":
                continue
            name, _, index = text_of(one.children[0]).partition("[")
            given = one.child_by_field_name("value")
            is_array = given is not None and given.type == "array"
            if given is not None and is_array:
                words = self.words(child for child in given.named_children if child.type in WORDS)
            else:
                words = [Word() if given is None else self.text(given)]
            append = len(one.children) > 1 and one.children[1].type == "+="
            self.set(name, words, append=append or bool(index), is_array=is_array or bool(index))
            found[name] = joined(self.values[name])
        return found

    def declare(self, words: list[Word], declared: dict[str, Word]) -> None:
        """Read `export NAME=value` and its kin."""
        for word in words[1:]:
            name, value = word.option()
            if NAME.fullmatch(name) and value is not None:
                self.set(name, [value])
                declared[name] = value
            elif words[0] == "export" and name in self.values:
                declared[name] = joined(self.values[name])
        if words[0] == "export":
            self.exported |= declared

    def input_of(self, node: Node) -> Word | None:
        """Return the text that a command reads: its here-document, or its here-string."""
        for redirect in redirects(node):
            if redirect.type == "herestring_redirect":
                return joined(self.text(one) for one in targets(redirect)[:1])
            parts = {child.type: child for child in redirect.named_children}
            if "heredoc_body" in parts:
                body, mark = parts["heredoc_body"], text_of(parts["heredoc_start"])
                return self.literal(text_of(body)) if mark[:1] in ("'", '"', "\\") else self.text(body)
        return None

    def write(self, redirect: Node, line: int, text: Word | None) -> None:
        """Note the file that a redirection writes."""
        sign = next((child.type for child in redirect.children if not child.is_named), "")
        if sign not in (">", ">>", ">|", "&>"):
            return
        for target in targets(redirect)[:1]:
            path = self.text(target)
            if text is not None and path.endswith(CONFIGURATIONS) and PRECISION_WORDS.search(text):
                self.notes[f"heredoc on line {line}"] = None
            self.note_file(path, text if sign != ">>" else None, line)

    def note_file(self, name: Word, text: Word | None, line: int) -> None:
        """Note a file that a command writes, without a text one that it changes."""
        key = str(PurePosixPath(name))
        if text is not None or key in self.files:
            self.files.pop(key, None)
            self.files[key] = WrittenFile(line=line, text=text)
