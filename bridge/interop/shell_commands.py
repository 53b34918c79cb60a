"""The commands of a launch script: assignments, declarations, functions, strings that are scripts, and launches."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from bridge.errors import PayloadError
from bridge.interop.contract import Loss
from bridge.interop.launch import COMMAND_WORDS, QUIET, SHELLS, found_launch, nested_script
from bridge.interop.shell_input import Xargs, echoed, heredoc_kind
from bridge.interop.shell_syntax import parse
from bridge.interop.shell_tree import Simple
from bridge.interop.shell_values import is_unknown
from bridge.interop.shell_ways import PRECISION_WORDS, Stop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from bridge.interop.shell_tokens import Token
    from bridge.interop.shell_tree import Node
    from bridge.interop.shell_values import Unknowns
    from bridge.interop.shell_ways import Way
    from bridge.interop.shell_words import Lexer

__all__ = ["Commands"]

MAX_DEPTH = 12
"""Of functions and strings within each other."""
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=")
READERS = frozenset({"read", "mapfile", "readarray"})
MAX_CALLS = 16
"""Of one xargs."""
ARGUMENTS_BY_NAME = re.compile(r"ARG|OPT|FLAG|PARAM", re.IGNORECASE)
DECLARERS = frozenset({"export", "declare", "local", "readonly", "typeset"})


class Commands:
    """Follows single commands.

    Args:
        run: Follows a list of commands on every way.
        lexer: Knows the lines of the script.
        unknowns: Know what an unknown piece was in the script.
    """

    def __init__(self, run: Callable[[Iterable[Node], list[Way]], list[Way]], lexer: Lexer, unknowns: Unknowns) -> None:
        self.run, self.lexer, self.unknowns = run, lexer, unknowns
        self.depth = 0
        self.fixed: int | None = None
        self.functions: dict[str, list[Node]] = {}
        self.called: set[str] = set()

    def line(self, at: int) -> int:
        """Return the line of an offset; inside a string that is a script, the line of the string."""
        return self.fixed if self.fixed is not None else self.lexer.line(at)

    def simple(self, node: Simple, way: Way) -> list[Way]:
        """Follow one command, or a line of assignments."""
        count = next((at for at, token in enumerate(node.items) if not self.assignment(token)), len(node.items))
        items = node.items[count:]
        words = self.words(items, way)  # bash expands them before it assigns
        prefix: dict[str, str] = {}
        before = dict(way.values.variables)
        for token in node.items[:count]:
            if named := self.assignment(token):
                self.assign(token, named, way, prefix)
        stop, way.stop = way.stop, None
        if not items:
            way.exported |= {name: value for name, value in prefix.items() if name in way.exported}
            return self.heredocs(node, [way], [])
        if self.continues(words, stop):
            self.lost(node, words, stop, way)
            return [way]
        self.runs(words, way)
        count = len(way.launches)
        ways = self.command(node, words, items, way=way, prefix=prefix)
        for name in prefix:  # `NAME=value command` sets it for the command only
            way.values.variables.pop(name, None)
            if name in before:
                way.values.variables[name] = before[name]
        for one in ways:
            if len(one.launches) > count:
                one.stop = Stop(line=self.fixed if self.fixed is not None else node.last_line, why=node.cut)
        return ways if words[:1] and words[0] in READERS else self.heredocs(node, ways, words)

    def continues(self, words: list[str], stop: Stop | None) -> bool:
        """Return whether what should be a command is the rest of one that a line end cut off."""
        first = words[0] if words else ""
        if first.startswith("-") and len(first) > 1:
            return True
        cut = stop is not None and bool(stop.why)
        return cut and all(map(is_unknown, words[:1])) and bool(ARGUMENTS_BY_NAME.search(self.shown(first)))

    def lost(self, node: Simple, words: list[str], stop: Stop | None, way: Way) -> None:
        """Note options that stand where a command should."""
        if stop is None:
            way.stray.append((self.line(node.start), words))
            return
        why = stop.why or "no backslash ends the line"
        detail = f"{why}, so that bash ends the command and the flags behind it are not passed"
        remedy = "Repair the line end, or drop what follows it."
        field, value = f"line continuation on line {stop.line}", self.shown(" ".join(words))
        loss = Loss(field=field, value=value, reason="dead knob", detail=detail, remedy=remedy)
        way.lose(loss, len(way.launches) - 1)
        way.stop = Stop(line=self.fixed if self.fixed is not None else node.last_line, why=node.cut)

    def runs(self, words: list[str], way: Way) -> None:
        """Note which files that the script wrote it starts now."""
        names = {PurePosixPath(launch.written).name for launch in way.launches if launch.written}
        if names and words and (words[0] not in QUIET or words[0] == "source"):
            way.ran |= names & {PurePosixPath(self.shown(word)).name for word in words}

    def shown(self, text: str) -> str:
        """Return a text with its unknown pieces as written."""
        return self.unknowns.shown(text)

    def command(
        self, node: Simple, words: list[str], items: list[Token], *, way: Way, prefix: dict[str, str]
    ) -> list[Way]:
        """Follow one command whose words are known."""
        command = words[0] if words else ""
        if command in DECLARERS:
            self.declare(command, words, items, way)
        elif command in (".", "source"):
            way.note(f"source {self.shown(' '.join(words[1:2]))}")
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
        elif command == "xargs":
            return self.xargs(node, words, way, prefix)
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
            words = [text for word in token.words for text in values.words(word)]
            if name in values.stated and not append and words and all(map(is_unknown, words)):
                words = values.stated[name].split()
            values.assign_list(name, words, append=append)
            return
        if token.word is None:
            return
        if append or index:
            text = values.text(token.word)[named.end() :]
        else:
            text = values.assigned(name, token.word, named.end())
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
            body = way.values.text(node.heredocs[-1]) if node.heredocs else way.values.unknown(name)
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

    def heredocs(self, node: Simple, ways: list[Way], words: list[str]) -> list[Way]:
        """Read a heredoc that is itself a script, or say that it is a configuration."""
        is_shell = bool(words) and PurePosixPath(words[0]).name in SHELLS
        for body in (*node.heredocs, *(node.strings if is_shell else ())):
            text = ways[0].values.text(body) if ways else ""
            chain = [words, *(self.words(sink.items, ways[0]) for sink in node.sinks if isinstance(sink, Simple))]
            outputs = (node, *(sink for sink in node.sinks if isinstance(sink, Simple)))
            files = [self.shown(ways[0].values.text(word)) for one in outputs for word in one.outputs]
            kind, file = heredoc_kind(chain, files)
            if PRECISION_WORDS.search(text) and (text.lstrip()[:1] in ("{", "[") or kind == "configuration"):
                for way in ways:
                    way.note(f"heredoc on line {self.line(node.start)}")
            elif kind in ("script", "written", "printed"):
                for way in ways:
                    self.script(way.values.text(body), node, way, file=file, is_printed=kind == "printed")
        return ways

    def script(self, text: str, node: Node, way: Way, *, file: str = "", is_printed: bool = False) -> None:
        """Follow a script that a process of its own runs, so that only what it starts comes back.

        Args:
            text: The script.
            node: Where it stands.
            way: The way that comes to it.
            file: Where it is written to instead of being run.
            is_printed: It is shown to somebody instead of being run.
        """
        inner = way.copy()
        inner.stop, inner.stray = None, []
        count = len(way.launches)
        for one in self.nested(text, node, inner):
            one.launches[count:] = [
                replace(launch, written=launch.written or file, is_printed=launch.is_printed or is_printed)
                for launch in one.launches[count:]
            ]
            if is_printed:
                one.notes = way.notes
            way.take_over(one)
            way.stray += [] if is_printed or file else one.stray

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
            self.script(script, node, way)
            return [way]
        started = found_launch(words)
        if started is not None:
            runner, program, arguments = started
            environment = {**way.exported, **(prefix or {})}
            line = self.line(node.start)
            way.launches.append(way.launch(line, program, arguments, runner=runner, environment=environment))
        return [way]

    def xargs(self, node: Simple, words: list[str], way: Way, prefix: Mapping[str, str]) -> list[Way]:
        """Note what xargs starts, with the arguments it is given where the script says them."""
        call = Xargs.of(words)
        given = self.given(node, call, way)
        first = len(way.launches)
        if given is None:
            mark = self.unknowns.mark(call.placeholder) if call.placeholder else ""
            commands = [[word.replace(call.placeholder, mark) if mark else word for word in call.command]]
        else:
            commands = call.calls(given)[:MAX_CALLS]
        ways = [way]
        for command in commands:
            ways = [found for one in ways for found in self.launch(node, ["xargs", *command], one, prefix)]
        if given is None:
            file = call.file or " ".join(way.values.text(word) for word in node.files)
            value = self.shown(file) or " ".join(node.fed.split()) or "standard input"
            detail = "the arguments come from a pipe or file which is not read, and can set the precision"
            remedy = "Write the arguments out, or convert them by themselves."
            field = f"xargs on line {self.line(node.start)}"
            for one in ways:
                one.lose(Loss(field=field, value=value, reason="unsupported", detail=detail, remedy=remedy), first)
        return ways

    def given(self, node: Simple, call: Xargs, way: Way) -> list[list[str]] | None:
        """Return the words of each line that xargs reads, None where the script does not hold them."""
        if call.file or node.files:
            return None
        if node.heredocs or node.strings:
            return [line.split() for line in way.values.text((*node.heredocs, *node.strings)[-1]).splitlines()]
        return echoed(self.words(node.source.items, way)) if isinstance(node.source, Simple) else None


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
