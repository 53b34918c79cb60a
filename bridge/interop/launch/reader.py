"""One reading of a launch script: its commands in source order, one environment, one branch of each condition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from bridge.errors import PayloadError
from bridge.interop.contract import Unmapped
from bridge.interop.launch.branches import CONTAINERS, FIRST, Branches, Choice
from bridge.interop.launch.conditions import is_arithmetic
from bridge.interop.launch.files import CONFIGURATION, WrittenFile
from bridge.interop.launch.launches import (
    COMMAND_WORDS,
    MODES,
    PRECISION_WORDS,
    SHELLS,
    STATING,
    UNREADABLE,
    Launch,
    found_launch,
    nested_script,
)
from bridge.interop.launch.script import COMMANDS, statements
from bridge.interop.launch.variables import is_unknown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tree_sitter import Node

    from bridge.interop.launch.files import Sources
    from bridge.interop.launch.script import Script

MAX_STEPS = 10_000
MAX_DEPTH = 12
"""Of functions and strings within each other."""
MAX_SOURCED = 8
DECLARERS = frozenset({"export", "declare", "local", "readonly", "typeset"})
POSITIONAL = (*map(str, range(1, 10)), "@", "*", "#")
LOOPS = frozenset({"for_statement", "while_statement", "c_style_for_statement"})
EDITORS = frozenset({"sed", "cp", "mv"})
READ_A_SCRIPT = SHELLS | {"sbatch", "srun", "ssh", "qsub", "bsub"}


class _Ended(Exception):  # noqa: N818  a jump, not an error
    """The script or function ends here."""


class Reader(Branches):
    """Reads a script under some assumptions; its arguments are those of `Branches`."""

    def __init__(self, sources: Sources, stated: Mapping[str, str], choice: Choice = FIRST, open_: str = "") -> None:
        super().__init__(sources, stated, choice, open_)
        self.notes: dict[str, None] = {}
        self.files: Mapping[str, WrittenFile] = {}
        self.steps = self.depth = self.sourced = 0
        self.last: tuple[int, int] | None = None
        """The end of the command that started something just before, and which launch it was."""
        self.stray: list[str] = []

    def read(self) -> Reader:
        """Find what the script starts; without any launch, the arguments that its variables hold."""
        path, error = self.sources.path, self.script.error
        self.block(statements(self.script.root))
        if not self.launches and error:
            remedy = "Correct the script there."
            raise PayloadError(f"{path}, line {error}: must be bash that can be read here, and is not. {remedy}")
        if not self.launches:
            self.launches.append(self.held())
        if error:
            self.notes[f"line {error}, which {UNREADABLE}"] = None
        unread, notes = self.unread(), tuple(self.notes)
        self.launches = [replace(launch, notes=notes, unread=unread) for launch in self.launches]
        return self

    def unread(self) -> str:
        """Return where text that this reading does not execute states a precision, as a noun; empty: nowhere.

        Text of a file that is sourced, or of a string that is a script, counts too; a mode comes before other flags.
        """
        found = [
            (mention.text not in MODES, place > 0, mention)
            for place, script in enumerate((self.sources.script, *self.sources.inner))
            for mention in script.unexecuted(STATING, self.executed)
        ]
        if not found:
            return ""
        _, is_inner, first = min(found)
        where = f"{'the branch at ' if first.is_branch else ''}line {first.line}"
        return f"{where}{' of what it reads' if is_inner else ''}, which holds {first.text},"

    def block(self, nodes: Iterable[Node]) -> None:
        """Read commands until one ends the script or the function."""
        try:
            self.run(nodes)
        except _Ended:
            return

    def run(self, nodes: Iterable[Node]) -> None:
        """Read commands in their order."""
        for node in nodes:
            self.steps += 1
            if self.steps > MAX_STEPS:
                self.notes[f"what follows after {MAX_STEPS} commands"] = None
                raise _Ended
            self.one(node)

    def one(self, node: Node) -> bool | None:
        """Read one command; return whether it succeeds as far as the file says."""
        kind = node.type
        if kind in COMMANDS:
            return self.command(node)
        if kind == "list":
            return self.joined(node)
        if kind == "redirected_statement":
            return self.one(node.named_children[0])
        if kind == "if_statement":
            self.conditional(node)
        elif kind == "case_statement":
            self.case(node)
        elif kind in LOOPS:
            self.loop(node)
        elif kind == "function_definition":
            name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
            if name is not None and body is not None:
                self.functions[self.script.text(name)] = (self.script, body)
        elif kind in CONTAINERS and not is_arithmetic(node):
            self.run(statements(node))
        return None

    def command(self, node: Node) -> bool | None:
        """Read a simple command, a declaration or assignments; return whether it succeeds where that is known."""
        self.executed.add(node.id)
        values = self.values
        redirects = self.script.redirects(node)
        words = self.expanded(node, redirects)
        last, self.last = self.last, None
        before = dict(values.values) if words else {}
        prefix = self.assigned(node)
        if words and words[0] in DECLARERS:
            self.declare(words, prefix)
            return True
        if not words:
            self.exported |= {name: value for name, value in prefix.items() if name in self.exported}
            return True
        try:
            return self.simple(node, redirects, words, prefix, last)
        finally:
            for name in prefix:  # `NAME=value command` sets it for the command only
                if name in before:
                    values.values[name] = before[name]
                else:
                    values.values.pop(name, None)

    def simple(
        self,
        node: Node,
        redirects: list[Node],
        words: list[str],
        prefix: Mapping[str, str],
        last: tuple[int, int] | None,
    ) -> bool | None:
        """Read one command by its expanded words."""
        first, line = words[0], node.start_point.row + 1
        end = max(one.end_point.row + 1 for one in (node, *redirects))
        if first in ("true", "false", ":"):
            return first != "false"
        if first in ("exit", "return"):
            raise _Ended
        if first.startswith("-") and len(first) > 1:
            self.lost(end, words, last)
        elif first in ("source", "."):
            self.source(words, line)
        elif first == "eval":
            self.nested(" ".join(words[1:]), line)
        elif first == "unset":
            for name in words[1:]:
                self.values.values.pop(name, None)
        elif first in self.functions:
            self.call(first, words[1:])
        else:
            self.launch(line, end, words, prefix)
            self.write(line, redirects, words)
        return None

    def lost(self, end: int, words: list[str], last: tuple[int, int] | None) -> None:
        """Record options that stand where a command should: the rest of one that a line end cut off."""
        if last is None:
            self.stray += words
            return
        before, at = last
        detail = "no backslash ends the line, or a comment or an empty line follows it"
        loss = Unmapped(
            field=f"line continuation on line {before}",
            value=self.unknowns.shown(" ".join(words)),
            reason="dead knob",
            detail=f"{detail}, so that bash ends the command and the flags behind it are not passed",
            remedy="Repair the line end, or drop what follows it.",
        )
        self.launches[at] = replace(self.launches[at], unmapped=(*self.launches[at].unmapped, loss))
        self.last = (end, at)

    def call(self, name: str, arguments: list[str]) -> None:
        """Read the body of a function with its arguments."""
        values = self.values.values
        before = {place: values.pop(place) for place in POSITIONAL if place in values}
        values |= {str(place): word for place, word in enumerate(arguments[:9], 1)}
        values |= {"@": arguments, "*": " ".join(arguments), "#": str(len(arguments))}
        script, body = self.functions[name]
        self.within(script, [body], self.line)
        for place in POSITIONAL:
            values.pop(place, None)
        values |= before

    def within(self, script: Script, nodes: Iterable[Node], line: int) -> None:
        """Read commands of a function, a string or another file."""
        if self.depth >= MAX_DEPTH:
            return
        before, self.script, self.line = (self.script, self.line), script, line
        self.depth += 1
        try:
            self.block(nodes)
        finally:
            self.depth -= 1
            self.script, self.line = before

    def source(self, words: list[str], line: int) -> None:
        """Read a file that stands in the folder of the script in the same environment; note any other."""
        text = self.sources.neighbour(words[1]) if len(words) > 1 and self.sourced < MAX_SOURCED else None
        self.sourced += text is not None
        if text is None or not self.parsed(text, line):
            self.notes[f"source {self.unknowns.shown(' '.join(words[1:2]))}"] = None

    def nested(self, text: str, line: int) -> bool:
        """Read a string that is a script; return whether it starts something."""
        if not COMMAND_WORDS.search(text):
            return False
        count = len(self.launches)
        if not self.parsed(text, line):
            self.notes[f"the string on line {line}"] = None
        return len(self.launches) > count

    def parsed(self, text: str, line: int) -> bool:
        """Read a text that is a script; return whether it can be parsed."""
        try:
            script = self.sources.parsed(text)
            self.within(script, statements(script.root), self.line or line)
        except PayloadError:
            return False
        return True

    def launch(self, line: int, end: int, words: list[str], prefix: Mapping[str, str]) -> None:
        """Note what a command starts."""
        inner = nested_script(words)
        if inner is not None and self.nested(inner, line):
            return
        started = found_launch(words)
        if started is None:
            return
        line = self.line or line
        self.last = (end, len(self.launches))
        place = sum(one.line == line for one in self.launches)
        made = self.made(line, self.unknowns.shown(started.program), started.arguments, prefix)
        self.launches.append(replace(made, runner=tuple(started.runner), place=place))

    def made(self, line: int, program: str, arguments: Iterable[str], prefix: Mapping[str, str]) -> Launch:
        """Return a launch in the present environment."""
        environment = {**self.exported, **prefix}
        return Launch(
            line=line,
            program=program,
            arguments=tuple(arguments),
            environment={name: self.unknowns.shown(value) for name, value in environment.items()},
            late=frozenset(name for name, value in environment.items() if is_unknown(value)),
            files=self.files,
            unknowns=self.unknowns,
        )

    def write(self, line: int, redirects: list[Node], words: list[str]) -> None:
        """Follow what a command writes: a configuration, or a script that a shell reads."""
        name = PurePosixPath(words[0]).name
        text, outputs = self.redirected(redirects)
        if text is not None and name in READ_A_SCRIPT:
            self.nested(text, line)
            return
        for _, output in outputs:
            if text is not None and CONFIGURATION.search(output) and PRECISION_WORDS.search(text):
                self.notes[f"heredoc on line {line}"] = None
        if name == "tee" and len(words) > 1:
            outputs = [("-a" in words, self.unknowns.shown(words[-1]))]
        elif name == "echo":
            text = " ".join(words[1:])
        elif name != "cat" or len(words) > 1:
            text = None
        if name in EDITORS:
            outputs += [(False, self.unknowns.shown(word)) for word in words[1:]]
        for append, output in outputs:
            self.files = WrittenFile.added(self.files, output, text, line, append=append)

    def held(self) -> Launch:
        """Return the arguments that variables hold, for a file that others source."""
        holders: dict[str, list[str]] = {}
        for name, value in self.values.values.items():
            words = value if isinstance(value, list) else value.split()
            if name not in self.values.stated and any(word.startswith("--") for word in words):
                holders[name] = [piece for word in words for piece in word.split()]
        texts = {name: " ".join(words) for name, words in holders.items()}
        merged = [
            name
            for name, text in texts.items()
            if not any(other != name and len(held) > len(text) and text in held for other, held in texts.items())
        ]
        arguments = (*(word for name in merged for word in holders[name]), *self.stray)
        return self.made(0, ", ".join(merged), arguments, {})
