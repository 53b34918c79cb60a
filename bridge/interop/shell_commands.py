"""The commands of a launch script: assignments, declarations, functions, strings that are scripts, and launches."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bridge.errors import PayloadError
from bridge.interop.launch import COMMAND_WORDS, found_launch, nested_script
from bridge.interop.shell_syntax import parse
from bridge.interop.shell_ways import PRECISION_WORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from bridge.interop.shell_tokens import Token
    from bridge.interop.shell_tree import Node, Simple
    from bridge.interop.shell_ways import Way
    from bridge.interop.shell_words import Lexer

__all__ = ["Commands"]

MAX_DEPTH = 12
"""Of functions and strings within each other."""
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=")
READERS = frozenset({"read", "mapfile", "readarray"})
DECLARERS = frozenset({"export", "declare", "local", "readonly", "typeset"})


class Commands:
    """Follows single commands.

    Args:
        run: Follows a list of commands on every way.
        lexer: Knows the lines of the script.
    """

    def __init__(self, run: Callable[[Iterable[Node], list[Way]], list[Way]], lexer: Lexer) -> None:
        self.run, self.lexer = run, lexer
        self.depth = 0
        self.fixed: int | None = None
        self.functions: dict[str, list[Node]] = {}
        self.called: set[str] = set()

    def line(self, at: int) -> int:
        """Return the line of an offset; inside a string that is a script, the line of the string."""
        return self.fixed if self.fixed is not None else self.lexer.line(at)

    def simple(self, node: Simple, way: Way) -> list[Way]:
        """Follow one command, or a line of assignments."""
        items = list(node.items)
        prefix: dict[str, str] = {}
        before = dict(way.values.variables)
        while items and (named := self.assignment(items[0])):
            self.assign(items.pop(0), named, way, prefix)
        if not items:
            way.exported |= {name: value for name, value in prefix.items() if name in way.exported}
            return self.heredocs(node, [way], ())
        words = self.words(items, way)
        ways = self.command(node, words, items, way=way, prefix=prefix)
        for name in prefix:  # `NAME=value command` sets it for the command only
            way.values.variables.pop(name, None)
            if name in before:
                way.values.variables[name] = before[name]
        return ways if words[:1] and words[0] in READERS else self.heredocs(node, ways, words)

    def command(
        self, node: Simple, words: list[str], items: list[Token], *, way: Way, prefix: dict[str, str]
    ) -> list[Way]:
        """Follow one command whose words are known."""
        command = words[0] if words else ""
        if command in DECLARERS:
            self.declare(command, words, items, way)
        elif command in (".", "source"):
            way.note(f"source {way.values.unknowns.shown(' '.join(words[1:2]))}")
        elif command in READERS:
            self.read(words, node, way)
        elif command == "unset":
            way.values.variables.update(dict.fromkeys(words[1:], ""))
        elif command == "shift":
            _shift(words, way)
        elif command == "set" and "--" in words:
            _give(words[words.index("--") + 1 :], way)
        elif command == "eval":
            return self.nested(" ".join(words[1:]), node, way)
        elif command in self.functions:
            return self.function(command, words[1:], way)
        else:
            return self.launch(node, words, way, prefix)
        return [way]

    def declare(self, command: str, words: list[str], items: list[Token], way: Way) -> None:
        """Follow `export NAME=value` and its kin."""
        declared: dict[str, str] = {}
        for token in items[1:]:
            name = token.word.literal if token.word is not None else None
            if named := self.assignment(token):
                self.assign(token, named, way, declared)
            elif command == "export" and name and name in way.values.variables:
                value = way.values.variables[name]
                declared[name] = value if isinstance(value, str) else " ".join(value)
        if command == "export" or "-x" in words:
            way.exported |= declared

    def words(self, items: list[Token], way: Way) -> list[str]:
        """Return the words of a command."""
        found: list[str] = []
        for token in items:
            if token.kind == "array":
                found.append(token.text)
            elif token.word is not None:
                found += way.values.words(token.word)
        return found

    def assignment(self, token: Token) -> re.Match[str] | None:
        """Return the head `NAME=` of an assignment, None for anything else."""
        if token.kind == "array":
            return ASSIGNMENT.match(token.text)
        first = token.word.parts[0] if token.word is not None and token.word.parts else None
        if first is None or first.kind != "text" or first.quoted:
            return None
        return ASSIGNMENT.match(first.text)

    def assign(self, token: Token, named: re.Match[str], way: Way, into: dict[str, str]) -> None:
        """Follow one assignment; scalars are noted in `into`."""
        name, index, append = named[1], named[2], bool(named[3])
        values = way.values
        if token.kind == "array":
            values.assign_list(name, [text for word in token.words for text in values.words(word)], append=append)
            return
        text = values.text(token.word)[named.end() :]
        if index:
            values.assign_element(name, text)
            return
        before = values.variables.get(name)
        values.assign(name, text, append=append)
        if before is None or isinstance(before, str):
            value = values.variables[name]
            into[name] = value if isinstance(value, str) else text

    def read(self, words: list[str], node: Simple, way: Way) -> None:
        """Follow `read NAME`, which may take a heredoc."""
        names = [word for word in words[1:] if re.fullmatch(r"[A-Za-z_]\w*", word)]
        for name in names:
            body = way.values.text(node.heredocs[-1]) if node.heredocs else way.values.unknowns.mark(f"${name}")
            way.values.variables[name] = body

    def function(self, name: str, words: list[str], way: Way) -> list[Way]:
        """Follow a call of a function of the script."""
        self.called.add(name)
        if self.depth >= MAX_DEPTH:
            return [way]
        outer = {place: way.values.variables.get(place) for place in (*"123456789", "@", "*")}
        _give(words, way)
        self.depth += 1
        ways = self.run(self.functions[name], [way])
        self.depth -= 1
        for one in ways:
            for place, value in outer.items():
                one.values.variables.pop(place, None)
                if value is not None:
                    one.values.variables[place] = value
        return ways

    def heredocs(self, node: Simple, ways: list[Way], words: Iterable[str]) -> list[Way]:
        """Read a heredoc that is itself a script, or say that it is a configuration."""
        for body in node.heredocs:
            text = ways[0].values.text(body) if ways else ""
            if text.lstrip()[:1] in ("{", "[") and PRECISION_WORDS.search(text):
                for way in ways:
                    way.note(f"heredoc on line {self.line(node.start)}")
            elif not any(word.startswith("python") for word in words):
                ways = [found for way in ways for found in self.nested(way.values.text(body), node, way)]
        return ways

    def nested(self, text: str, node: Node, way: Way) -> list[Way]:
        """Follow a script that is a string of this one."""
        if self.depth >= MAX_DEPTH or not COMMAND_WORDS.search(text):
            return [way]
        try:
            nodes, _ = parse(text, self.lexer.path)
        except PayloadError:
            way.note(f"the command string on line {self.line(node.start)}")
            return [way]
        self.depth += 1
        outer, self.fixed = self.fixed, self.line(node.start)
        ways = self.run(nodes, [way])
        self.fixed = outer
        self.depth -= 1
        return ways

    def launch(self, node: Node, words: list[str], way: Way, prefix: Mapping[str, str] | None = None) -> list[Way]:
        """Note a command that starts a program."""
        script = nested_script(words)
        if script is not None:
            return self.nested(script, node, way)
        started = found_launch(words)
        if started is not None:
            runner, program, arguments = started
            environment = {**way.exported, **(prefix or {})}
            line = self.line(node.start)
            way.launches.append(way.launch(line, program, arguments, runner=runner, environment=environment))
        return [way]


def _give(words: list[str], way: Way) -> None:
    """Set the positional parameters."""
    given = {str(place): word for place, word in enumerate(words[:9], 1)}
    way.values.variables.update({**given, "@": list(words), "*": " ".join(words)})


def _shift(words: list[str], way: Way) -> None:
    held = way.values.variables.get("@")
    if isinstance(held, list):
        count = int(words[1]) if len(words) > 1 and words[1].isdigit() else 1
        for place in range(1, 10):
            way.values.variables.pop(str(place), None)
        _give(held[count:], way)
