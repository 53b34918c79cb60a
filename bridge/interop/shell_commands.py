"""The commands of a launch script: functions, strings that are scripts, files that it writes, and launches."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from bridge.errors import PayloadError
from bridge.interop.contract import Unmapped
from bridge.interop.launch import COMMAND_WORDS, QUIET, SHELLS, found_launch, nested_script, started_script
from bridge.interop.shell_builtins import BUILTINS, READERS, assign, assignment, expanded, follow, give, judged
from bridge.interop.shell_input import Xargs, echoed, heredoc_kind
from bridge.interop.shell_precision import PRECISION_WORDS, deciding_keys
from bridge.interop.shell_syntax import parse
from bridge.interop.shell_tree import Simple
from bridge.interop.shell_values import is_unknown
from bridge.interop.shell_ways import Stop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from bridge.interop.shell_builtins import Words
    from bridge.interop.shell_tokens import Token
    from bridge.interop.shell_tree import Node
    from bridge.interop.shell_values import Unknowns
    from bridge.interop.shell_ways import Way
    from bridge.interop.shell_words import Lexer

__all__ = ["Commands"]

MAX_DEPTH = 12
"""Of functions and strings within each other."""
MAX_CALLS = 16
"""Of one xargs."""
ARGUMENTS_BY_NAME = re.compile(r"ARG|OPT|FLAG|PARAM", re.IGNORECASE)
POSITIONAL = (*"123456789", "@", "*")


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
        count = next((at for at, token in enumerate(node.items) if not assignment(token)), len(node.items))
        items = node.items[count:]
        given = expanded(items, way.values)  # bash expands them before it assigns
        words = given.texts
        prefix: dict[str, str] = {}
        heads = [named for token in node.items[:count] if (named := assignment(token))]
        before = {
            named[1]: (way.values.variables.get(named[1]), way.values.reading(named[1])) for named in heads if items
        }
        for token, named in zip(node.items, heads, strict=False):
            assign(token, named, way, prefix)
        stop, way.stop = way.stop, None
        if not items:
            way.exported |= {name: value for name, value in prefix.items() if name in way.exported}
            return self.heredocs(node, [way], [])
        if self.continues(words, stop):
            self.lost(node, words, stop, way)
            return [way]
        self.runs(words, way)
        count = len(way.launches)
        ways = self.command(node, given, items=items, way=way, prefix=prefix)
        for one in ways:
            for name, (value, read) in before.items():  # `NAME=value command` sets it for the command only
                one.values.forget(name)
                if value is not None:
                    one.values.set(name, value, read)
            if len(one.launches) > count:
                one.stop = Stop(line=self.fixed if self.fixed is not None else node.last_line, why=node.cut)
        self.writes(node, words, ways)
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
        loss = Unmapped(field=field, value=value, reason="dead knob", detail=detail, remedy=remedy)
        way.report(loss, len(way.launches) - 1)
        way.stop = Stop(line=self.fixed if self.fixed is not None else node.last_line, why=node.cut)

    def runs(self, words: list[str], way: Way) -> None:
        """Note which files that the script wrote it starts now."""
        if way.written and words and (words[0] not in QUIET or words[0] == "source"):
            way.ran |= way.written & {PurePosixPath(self.shown(word)).name for word in words}

    def shown(self, text: str) -> str:
        """Return a text with its unknown pieces as written."""
        return self.unknowns.shown(text)

    def command(
        self,
        node: Simple,
        given: Words,
        *,
        items: list[Token],
        way: Way,
        prefix: dict[str, str],
    ) -> list[Way]:
        """Follow one command whose words are known."""
        words = given.texts
        command = words[0] if words else ""
        if command in BUILTINS:
            follow(given, items, node, way)
        elif command in (".", "source"):
            way.note(f"source {self.shown(' '.join(words[1:2]))}")
        elif command == "eval":
            more = given.deciding - way.values.deciding
            way.values.deciding |= more
            ways = self.nested(" ".join(words[1:]), node, way, is_here=True)
            for one in ways:
                one.values.deciding -= more
            return ways
        elif command in self.functions:
            return self.function(command, given, way)
        elif command == "xargs":
            return self.xargs(node, given, way, prefix)
        else:
            return self.launch(node, words, way, prefix, given.deciding)
        return [way]

    def function(self, name: str, given: Words, way: Way) -> list[Way]:
        """Follow a call of a function of the script."""
        self.called.add(name)
        if self.depth >= MAX_DEPTH:
            return [way]
        values = way.values
        outer = {place: (values.variables.get(place), values.reading(place)) for place in POSITIONAL}
        for place in POSITIONAL:
            values.forget(place)
        give(given, 1, values)
        frame = values.enter()
        self.depth += 1
        ways = self.run(self.functions[name], [way])
        self.depth -= 1
        for one in ways:
            one.values.leave(frame)
            for place, (value, read) in outer.items():
                one.values.forget(place)
                if value is not None:
                    one.values.set(place, value, read)
        return ways

    def writes(self, node: Simple, words: list[str], ways: list[Way]) -> None:
        """Note the files that a command writes, and what it makes them from."""
        line = self.line(node.start)
        for way in ways if words and not node.heredocs else ():
            values, command = way.values, words[0]
            outputs = [values.text(word) for word in node.outputs]
            if command == "echo" and outputs:
                text = " ".join(word for word in words[1:] if not re.fullmatch(r"-[neE]+", word))
                way.files.write(outputs[-1], text, line, append=node.appends)
            elif outputs:
                chain, source = [[*words, *(values.text(word) for word in node.files)]], node.source
                while isinstance(source, Simple):
                    read = [values.text(word) for word in source.files]
                    chain.append([*expanded(source.items, values).texts, *read])
                    source = source.source
                way.files.make(outputs, chain, line)
            way.files.run(words, line)

    def heredocs(self, node: Simple, ways: list[Way], words: list[str]) -> list[Way]:
        """Read a heredoc that is itself a script, or say that it is a configuration."""
        is_shell = bool(words) and PurePosixPath(words[0]).name in SHELLS
        for body in (*node.heredocs, *(node.strings if is_shell else ())):
            text = ways[0].values.text(body) if ways else ""
            sinks = [sink for sink in node.sinks if isinstance(sink, Simple)] if ways else []
            chain = [words, *(expanded(sink.items, ways[0].values).texts for sink in sinks)]
            files = [self.shown(ways[0].values.text(word)) for one in (node, *sinks) for word in one.outputs]
            kind, file = heredoc_kind(chain, files)
            for way in ways if file else ():
                taken = way.decided(deciding_keys(way.values.pieces(body)))
                written = way.values.text(body)
                way.files.write(file, written, self.line(node.start), append=node.appends, defaulted=taken)
            if PRECISION_WORDS.search(text) and (text.lstrip()[:1] in ("{", "[") or kind == "configuration"):
                for way in ways:
                    way.note(f"heredoc on line {self.line(node.start)}")
            elif kind in ("script", "written", "printed"):
                for way in ways:
                    with way.values.watching() as read:
                        text = way.values.text(body)
                        about = judged([body], way.values) | read.flags if read else set()
                    self.script(text, node, way, file=file, is_printed=kind == "printed", about=about)
        return ways

    def script(
        self,
        text: str,
        node: Node,
        way: Way,
        *,
        file: str = "",
        is_printed: bool = False,
        about: Iterable[str] = (),
    ) -> None:
        """Follow a script that a process of its own runs, so that only what it starts comes back.

        Args:
            text: The script.
            node: Where it stands.
            way: The way that comes to it.
            file: Where it is written to instead of being run.
            is_printed: It is shown to somebody instead of being run.
            about: The defaults on which the options in it depend that bear on precision.
        """
        inner = way.copy()
        inner.values.deciding |= set(about)
        inner.stop, inner.stray = None, []
        count = len(way.launches)
        for one in self.nested(text, node, inner):
            one.launches[count:] = [
                replace(launch, written=launch.written or file, is_printed=launch.is_printed or is_printed)
                for launch in one.launches[count:]
            ]
            if file or is_printed:
                one.scripts = way.scripts
            if file and len(one.launches) > count:
                one.written |= {PurePosixPath(file).name}
            if is_printed:
                one.notes = way.notes
            way.take_over(one)
            way.stray += [] if is_printed or file else one.stray

    def nested(self, text: str, node: Node, way: Way, *, is_here: bool = False) -> list[Way]:
        """Follow a script that is a string of this one; `is_here`: what it sets stays set."""
        if self.depth >= MAX_DEPTH or not (COMMAND_WORDS.search(text) or (is_here and "=" in text)):
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

    def launch(
        self, node: Node, words: list[str], way: Way, prefix: Mapping[str, str], about: Iterable[str] = ()
    ) -> list[Way]:
        """Note a command that starts a program; `about`: the defaults on which its options depend."""
        script = nested_script(words)
        if script is not None:
            self.script(script, node, way, about=about)
            return [way]
        environment = {**way.exported, **(prefix or {})}
        line = self.line(node.start)
        started = found_launch(words)
        if started is not None:
            runner, program, arguments = started
            way.launches.append(
                way.launch(line, program, arguments, about, runner=runner, environment=environment, at=node.start)
            )
        other = started_script(words, environment)
        if other is not None:
            runner, program, arguments, trains = other
            note = f"script {self.shown(program)}"
            noted = way.notes
            way.note(note)
            found = way.launch(line, program, arguments, about, runner=runner, environment=environment, at=node.start)
            way.notes = noted
            if started is not None and started[1] in (program, words[0]):
                way.launches[-1] = found
            elif trains and started is None:
                way.launches.append(found)
            elif started is None:
                way.scripts.append(found)
        return [way]

    def xargs(self, node: Simple, words: Words, way: Way, prefix: Mapping[str, str]) -> list[Way]:
        """Note what xargs starts, with the arguments it is given where the script says them."""
        call = Xargs.of(words.texts)
        given = self.given(node, call, way)
        first = len(way.launches)
        if given is None:
            mark = self.unknowns.mark(call.placeholder) if call.placeholder else ""
            commands = [[word.replace(call.placeholder, mark) if mark else word for word in call.command]]
        else:
            commands = call.calls(given)[:MAX_CALLS]
        ways = [way]
        for command in commands:
            started = ["xargs", *command]
            ways = [found for one in ways for found in self.launch(node, started, one, prefix, words.deciding)]
        if given is None:
            file = call.file or " ".join(way.values.text(word) for word in node.files)
            value = self.shown(file) or " ".join(node.fed.split()) or "standard input"
            detail = "the arguments come from a pipe or file which is not read, and can set the precision"
            remedy = "Write the arguments out, or convert them by themselves."
            field = f"xargs on line {self.line(node.start)}"
            for one in ways:
                one.report(
                    Unmapped(field=field, value=value, reason="unsupported", detail=detail, remedy=remedy), first
                )
        return ways

    def given(self, node: Simple, call: Xargs, way: Way) -> list[list[str]] | None:
        """Return the words of each line that xargs reads, None where the script does not hold them."""
        if call.file or node.files:
            return None
        if node.heredocs or node.strings:
            return [line.split() for line in way.values.text((*node.heredocs, *node.strings)[-1]).splitlines()]
        return echoed(expanded(node.source.items, way.values).texts) if isinstance(node.source, Simple) else None
