"""One reading of a launch script: its commands in source order, one environment, one branch of each condition."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from bridge.errors import PayloadError
from bridge.interop.contract import Unmapped
from bridge.interop.launch.conditions import decided
from bridge.interop.launch.files import CONFIGURATION, WrittenFile, written
from bridge.interop.launch.launches import (
    COMMAND_WORDS,
    QUIET,
    SHELLS,
    UNREADABLE,
    Launch,
    found_launch,
    nested_script,
)
from bridge.interop.launch.relevance import MODES, PRECISION_WORDS, STATING
from bridge.interop.launch.syntax import COMMANDS, statements
from bridge.interop.launch.values import Values, is_unknown, name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tree_sitter import Node

    from bridge.interop.launch.files import Sources
    from bridge.interop.launch.syntax import Command, Script

__all__ = ["Assumptions", "Choice", "Reader", "Reading"]

MAX_STEPS = 20_000
"""Commands of one reading."""
MAX_DEPTH = 12
"""Of functions and strings within each other."""
MAX_SOURCED = 8
MAX_OPTIONS = 12
DECLARERS = frozenset({"export", "declare", "local", "readonly", "typeset"})
POSITIONAL = (*map(str, range(1, 10)), "@", "*", "#")
NAME = re.compile(r"[A-Za-z_]\w*")
EQUALITY = frozenset({"=", "==", "!="})
TESTS = frozenset({"test_command", "negated_command"})
CONTAINERS = frozenset({"compound_statement", "subshell", "pipeline", "do_group", "else_clause", "ERROR"})
LOOPS = frozenset({"for_statement", "while_statement", "c_style_for_statement"})
EDITORS = frozenset({"sed", "cp", "mv"})
READ_A_SCRIPT = frozenset({*SHELLS, "sbatch", "srun", "ssh", "qsub", "bsub"})


class _Ended(Exception):  # noqa: N818  a jump, not an error
    """The script or function ends here."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One alternative at a condition that the file does not decide."""

    assumed: tuple[tuple[str, str], ...] = ()
    """Values of variables under which bash comes there."""
    forced: tuple[tuple[str, bool], ...] = ()
    """Conditions that hold, or do not."""
    label: str = ""
    """As a report shows it."""


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What one reading assumes."""

    stated: Mapping[str, str] = field(default_factory=dict)
    """What the user states of the run."""
    choice: Choice = Choice()
    open: str = ""
    """A variable whose default in the script is not taken."""


@dataclass
class Reading:
    """What one reading finds."""

    launches: list[Launch] = field(default_factory=list)
    points: dict[str, tuple[str, list[Choice]]] = field(default_factory=dict)
    """Undecided condition -> the branch that was taken, as a report shows it, and the others."""
    defaulted: dict[str, str] = field(default_factory=dict)
    """Variables that nothing sets and whose default in the script was taken."""
    notes: dict[str, None] = field(default_factory=dict)
    """What is not read, in order."""


class Reader:
    """Reads a script under some assumptions.

    Args:
        sources: The script, and what all its readings share.
        given: What this reading assumes.
    """

    def __init__(self, sources: Sources, given: Assumptions) -> None:
        self.sources, self.script, self.path = sources, sources.script, sources.path
        self.unknowns = unknowns = sources.unknowns
        self.forced = dict(given.choice.forced)
        self.values = Values(unknowns, given.stated, dict(given.choice.assumed), given.open)
        self.found = Reading(defaulted=self.values.defaulted)
        self.exported: dict[str, str] = {}
        self.files: Mapping[str, WrittenFile] = {}
        self.functions: dict[str, tuple[Script, Node]] = {}
        self.called: set[str] = set()
        self.steps = self.depth = self.sourced = 0
        self.line = 0
        """The line of the script that a string or a sourced file stands on; 0: outside of one."""
        self.executed: set[int] = set()
        """Identifiers of the commands that were read."""
        self.last: tuple[int, int] | None = None
        """The end of the command that started something just before, and which launch it was."""
        self.stray: list[str] = []

    def read(self) -> Reading:
        """Return what the script starts; without any launch, what its functions would, or its variables hold."""
        error = self.script.error
        self.block(statements(self.script.root))
        for name, (_, body) in list(self.functions.items()) if not self.found.launches else ():
            if name not in self.called:
                self.block([body])
        if not self.found.launches and error:
            remedy = "Correct the script there."
            raise PayloadError(f"{self.path}, line {error}: must be bash that can be read here, and is not. {remedy}")
        if not self.found.launches:
            self.found.launches.append(self.held())
        if error:
            self.found.notes[f"line {error}, which {UNREADABLE}"] = None
        unread = self.unread()
        self.found.launches = [
            replace(launch, notes=tuple(dict.fromkeys((*self.found.notes, *launch.notes))), unread=unread)
            for launch in self.found.launches
        ]
        return self.found

    def unread(self) -> str:
        """Return where text that this reading does not execute states a precision, as a noun; empty: nowhere.

        Text of a file that is sourced, or of a string that is a script, counts too; a mode comes before other flags.
        """
        found = [
            (flag not in MODES, place > 0, line, flag, is_branch)
            for place, script in enumerate((self.script, *self.sources.inner))
            for line, flag, is_branch in script.unexecuted(STATING, self.executed)
        ]
        if not found:
            return ""
        _, is_inner, line, flag, is_branch = min(found)
        where = f"{'the branch at ' if is_branch else ''}line {line}{' of what it reads' if is_inner else ''}"
        return f"{where}, which holds {flag},"

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
                self.found.notes[f"what follows after {MAX_STEPS} commands"] = None
                raise _Ended
            self.one(node)

    def one(self, node: Node) -> bool | None:
        """Read one command; return whether it succeeds as far as the file says."""
        kind = node.type
        if kind in COMMANDS:
            return self.command(node)
        if kind == "list":
            return self.joined(node)
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
        elif kind == "redirected_statement":
            return self.one(node.named_children[0])
        elif kind in CONTAINERS and not _is_arithmetic(node):
            self.run(statements(node))
        return None

    # -- branches ----------------------------------------------------------------------------------------------------

    def conditional(self, node: Node) -> None:
        """Read the branch of an `if` that is taken."""
        clauses = [node, *(child for child in node.children if child.type == "elif_clause")]
        otherwise = [child for child in node.children if child.type == "else_clause"]
        for clause in clauses:
            then = next((at for at, child in enumerate(clause.children) if child.type == "then"), 0)
            condition = [child for child in clause.children[:then] if child.is_named and child.type != "comment"]
            body = [
                child
                for child in clause.children[then:]
                if child.is_named and child.type not in ("elif_clause", "else_clause", "comment")
            ]
            word = "elif" if clause is not node else "if"
            if self.holds(condition, clause, word, body, otherwise if clause is clauses[-1] else []):
                self.run(body)
                return
        self.run(otherwise)

    def holds(self, condition: list[Node], at: Node, word: str, body: list[Node], otherwise: list[Node]) -> bool:
        """Return whether a condition holds; where the file does not say, with nothing set.

        A branch that only ends the script is not taken.
        """
        for node in condition[:-1]:
            self.one(node)
        answer = self.answer(condition[-1], sure=True) if condition else True
        if answer is not None:
            return answer != (not self.found.launches and self.ends(body if answer else otherwise))
        if self.ends(body):
            return False
        if self.ends(otherwise):
            return True
        shown = self.unknowns.shown(self.script.shown(condition))
        line = self.line or at.start_point.row + 1
        default = bool(self.answer(condition[-1], sure=False))
        labels = {True: f"line {line}, {word} {shown}", False: f"line {line}, not {shown}"}
        equal = self.equality(condition[-1])
        if equal is not None:
            key = f"${equal[0]}"
            other = Choice(assumed=(equal,), label=labels[not default])
        else:
            key = shown
            default = self.forced.get(key, default)
            other = Choice(forced=((key, not default),), label=labels[not default])
        others = self.found.points.setdefault(key, (labels[default], []))[1]
        if other not in others and len(others) < MAX_OPTIONS:
            others.append(other)
        return default

    def equality(self, node: Node) -> tuple[str, str] | None:
        """Return variable and value where a test compares a variable that nothing sets with a text."""
        if node.type == "negated_command":
            return self.equality(node.named_children[-1])
        words = self.test_words(node)
        if words is None or len(words) != 3 or words[1] not in EQUALITY:
            return None
        sides = (words[0], words[2]) if is_unknown(words[0]) else (words[2], words[0])
        name = name_of(self.unknowns.shown(sides[0])) if self.unknowns.is_unset(sides[0]) else ""
        value = sides[1].replace("*", "")
        return (name, value) if name and not is_unknown(value) and value else None

    def test_words(self, node: Node) -> list[str] | None:
        """Return the words of a test without its brackets."""
        if node.type == "test_command" and node.children[0].type in ("[", "[["):
            return [self.values.text(word) for word in self.script.test(node)]
        if node.type == "command" and self.script.command(node).name == "test":
            return [self.values.text(word) for word in self.script.command(node).words[1:]]
        return None

    def answer(self, node: Node, *, sure: bool) -> bool | None:
        """Return whether a command succeeds: None where the file does not say, unless a guess will do."""
        if node.type == "negated_command":
            inner = self.answer(node.named_children[-1], sure=sure)
            return None if inner is None else not inner
        if node.type == "list":
            left, right = (self.answer(node.children[side], sure=sure) for side in (0, -1))
            strong = node.children[1].type == "||"
            if strong in (left, right):
                return strong
            return None if None in (left, right) else not strong
        words = self.test_words(node)
        if words is not None:
            if not sure:
                words = [self.unknowns.with_nothing_set(word) for word in words]
            is_double = node.children[0].type == "[["
            return decided(words, double=is_double) if sure else decided(words, double=is_double) or False
        if node.type == "redirected_statement":
            return self.answer(node.named_children[0], sure=sure)
        if node.type in ("command", "pipeline") and sure:
            return self.one(node)
        if node.type == "command" and self.script.command(node).name in ("true", ":"):
            return True
        return None if sure else False

    def joined(self, node: Node) -> bool | None:
        """Read `left && right` or `left || right`; return whether it succeeds."""
        left, right, wanted = node.children[0], node.children[-1], node.children[1].type == "&&"
        if self.is_test(left):
            if self.holds([left], node, "if", *(([right], []) if wanted else ([], [right]))) == wanted:
                return self.one(right)
            return not wanted
        status = self.one(left)
        if status is None:
            status = True  # a command that is not known to fail
        return self.one(right) if status == wanted else status

    def is_test(self, node: Node) -> bool:
        """Return whether a node is nothing but tests."""
        if node.type == "list":
            return self.is_test(node.children[0]) and self.is_test(node.children[-1])
        return node.type in TESTS or _is_arithmetic(node)

    def ends(self, body: list[Node], script: Script | None = None, depth: int = 0) -> bool:
        """Return whether a branch ends the script and starts nothing."""
        script = script or self.script
        for node in body:
            if node.type in CONTAINERS and self.ends(statements(node), script, depth):
                return True
            inner = node.named_children[0] if node.type == "redirected_statement" else node
            if inner.type != "command":
                continue
            first = script.command(inner).name
            if first in ("exit", "return"):
                return True
            if first in self.functions and depth < 3:
                inside, function = self.functions[first]
                if self.ends([function], inside, depth + 1):
                    return True
            if COMMAND_WORDS.search(script.text(inner)) and first not in QUIET:
                return False
        return False

    def case(self, node: Node) -> None:
        """Read the arm of a `case` that is taken."""
        (subject,) = map(self.values.text, self.script.words(node.children_by_field_name("value")))
        name = name_of(self.unknowns.shown(subject)) if self.unknowns.is_unset(subject) else ""
        plain = self.unknowns.with_nothing_set(subject)
        late = is_unknown(subject)
        shown = self.unknowns.shown(subject)
        key = f"${name}" if name else shown
        taken: list[Node] | None = None
        label = ""
        others: list[Choice] = []
        heads: list[str] = []
        for item in node.named_children:
            if item.type != "case_item":
                continue
            patterns = item.children_by_field_name("value")
            heads.append(self.script.shown(patterns))
            texts = [self.values.text(word) for word in self.script.words(patterns)]
            body = item.named_children[len(patterns) :]
            own = f"line {self.line or item.start_point.row + 1}, if case {shown} in {heads[-1]})"
            arm = f"{key} in {heads[-1]}"
            if late and self.ends(body):
                continue
            if taken is None and self.forced.get(arm, any(fnmatchcase(plain, pattern) for pattern in texts)):
                taken, label = body, own
                if not late:
                    break
            elif late and "*" not in texts:
                literal = next((one.replace("*", "") for one in texts if one), "")
                if name and literal and not is_unknown(literal):
                    others.append(Choice(assumed=((name, literal),), label=own))
                else:
                    others.append(Choice(forced=((arm, True),), label=own))
        if others:
            neither = f"{'neither' if len(heads) > 1 else 'not'} {' nor '.join(heads)}"
            label = label or f"line {self.line or node.start_point.row + 1}, case {shown} is {neither}"
            known = self.found.points.setdefault(key, (label, []))[1]
            known += [one for one in others[: MAX_OPTIONS - len(known)] if one not in known]
        self.run(taken or ())

    def loop(self, node: Node) -> None:
        """Read the body of a loop once, with the first value of its variable."""
        if node.type == "for_statement":
            (name,) = map(self.script.text, node.children_by_field_name("variable"))
            items = self.values.all_words(self.script.words(node.children_by_field_name("value")))
            is_known = items and name not in self.values.stated
            self.values.set(name, items[0] if is_known else self.values.unknown(name))
        self.run(node.children_by_field_name("body"))

    # -- commands ----------------------------------------------------------------------------------------------------

    def command(self, node: Node) -> bool | None:
        """Read a simple command, a declaration or assignments; return whether it succeeds where that is known."""
        self.executed.add(node.id)
        command, values = self.script.command(node), self.values
        words = values.all_words(command.words)
        last, self.last = self.last, None
        before = {one[0]: values.variables.get(one[0]) for one in command.assignments}
        prefix = self.assigned(command)
        if words and words[0] in DECLARERS:
            self.declare(words, prefix)
            return True
        if not words:
            self.exported |= {name: value for name, value in prefix.items() if name in self.exported}
            return True
        try:
            return self.simple(command, words, prefix, last)
        finally:
            for name, value in before.items():  # `NAME=value command` sets it for the command only
                if value is None:
                    values.variables.pop(name, None)
                else:
                    values.variables[name] = value

    def simple(
        self, command: Command, words: list[str], prefix: Mapping[str, str], last: tuple[int, int] | None
    ) -> bool | None:
        """Read one command by its expanded words."""
        first = words[0]
        if first in ("true", "false", ":"):
            return first != "false"
        if first in ("exit", "return"):
            raise _Ended
        if first.startswith("-") and len(first) > 1:
            self.lost(command, words, last)
        elif first in ("source", "."):
            self.source(words, command.line)
        elif first == "eval":
            self.nested(" ".join(words[1:]), command.line)
        elif first == "unset":
            for name in words[1:]:
                self.values.variables.pop(name, None)
        elif first in self.functions:
            self.call(first, words)
        else:
            self.launch(command, words, prefix)
            self.write(command, words)
        return None

    def declare(self, words: list[str], declared: dict[str, str]) -> None:
        """Read `export NAME=value` and its kin."""
        switches = "".join(word[1:] for word in words[1:] if word.startswith("-"))
        for word in words[1:]:
            name, equals, value = word.partition("=")
            if NAME.fullmatch(name) and equals:
                self.values.set(name, value)
                declared[name] = value
            elif words[0] == "export" and name in self.values.variables:
                held = self.values.variables[name]
                declared[name] = held if isinstance(held, str) else " ".join(held)
        if words[0] == "export" or "x" in switches:
            self.exported |= declared

    def assigned(self, command: Command) -> dict[str, str]:
        """Set the variables of a command; return those that hold a text."""
        values, found = self.values, {}
        for name, index, append, value in command.assignments:
            if isinstance(value, list):
                items = values.all_words(value)
                if name in values.stated and not append and items and all(map(is_unknown, items)):
                    items = values.stated[name].split()
                values.set(name, items, append=append)
                continue
            taken = values.taken
            text = values.text(value)
            if name in values.stated and values.taken > taken and not append:
                text = values.stated[name]
            if index:
                values.set(name, [text], append=True)
                continue
            values.set(name, text, append=append)
            held = values.variables[name]
            if isinstance(held, str):
                found[name] = held
        return found

    def lost(self, command: Command, words: list[str], last: tuple[int, int] | None) -> None:
        """Record options that stand where a command should: the rest of one that a line end cut off."""
        if last is None:
            self.stray += words
            return
        end, at = last
        why = _cut(self.script.lines, end) or _cut(self.script.lines, command.line - 1) or "no backslash ends the line"
        loss = Unmapped(
            field=f"line continuation on line {end}",
            value=self.unknowns.shown(" ".join(words)),
            reason="dead knob",
            detail=f"{why}, so that bash ends the command and the flags behind it are not passed",
            remedy="Repair the line end, or drop what follows it.",
        )
        launch = self.found.launches[at]
        self.found.launches[at] = replace(launch, unmapped=(*launch.unmapped, loss))
        self.last = (command.end, at)

    def call(self, name: str, words: list[str]) -> None:
        """Read the body of a function with its arguments."""
        self.called.add(name)
        variables, arguments = self.values.variables, words[1:]
        before = {place: variables[place] for place in POSITIONAL if place in variables}
        given = {str(place): word for place, word in enumerate(arguments[:9], 1)}
        self._replace(given | {"@": arguments, "*": " ".join(arguments), "#": str(len(arguments))})
        script, body = self.functions[name]
        self.within(script, [body], self.line)
        self._replace(before)

    def _replace(self, given: Mapping[str, str | list[str]]) -> None:
        """Set the arguments of a function, and drop all others."""
        for place in POSITIONAL:
            self.values.variables.pop(place, None)
        self.values.variables |= given

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
            self.found.notes[f"source {self.unknowns.shown(' '.join(words[1:2]))}"] = None

    def nested(self, text: str, line: int) -> bool:
        """Read a string that is a script; return whether it starts something."""
        if not COMMAND_WORDS.search(text):
            return False
        count = len(self.found.launches)
        if not self.parsed(text, line):
            self.found.notes[f"the string on line {line}"] = None
        return len(self.found.launches) > count

    def parsed(self, text: str, line: int) -> bool:
        """Read a text that is a script; return whether it can be parsed."""
        try:
            script = self.sources.parsed(text)
            self.within(script, statements(script.root), self.line or line)
        except PayloadError:
            return False
        return True

    # -- launches ----------------------------------------------------------------------------------------------------

    def launch(self, command: Command, words: list[str], prefix: Mapping[str, str]) -> None:
        """Note what a command starts."""
        inner = nested_script(words)
        if inner is not None and self.nested(inner, command.line):
            return
        environment = {**self.exported, **prefix}
        started = found_launch(words, environment)
        if started is None:
            return
        runner, program, arguments = started
        line = self.line or command.line
        self.last = (command.end, len(self.found.launches))
        self.found.launches.append(
            Launch(
                line=line,
                program=self.unknowns.shown(program),
                arguments=tuple(arguments),
                runner=tuple(runner),
                environment={name: self.unknowns.shown(value) for name, value in environment.items()},
                late=frozenset(name for name, value in environment.items() if is_unknown(value)),
                files=self.files,
                place=sum(one.line == line for one in self.found.launches),
                unknowns=self.unknowns,
            )
        )

    def write(self, command: Command, words: list[str]) -> None:
        """Follow what a command writes: a configuration, or a script that a shell reads."""
        name = PurePosixPath(words[0]).name
        text = self.values.text(command.body) if command.body is not None else None
        if text is not None and name in READ_A_SCRIPT:
            self.nested(text, command.line)
            return
        outputs = [(append, self.unknowns.shown(self.values.text(target))) for append, target in command.outputs]
        for _, target in outputs:
            if text is not None and CONFIGURATION.search(target) and PRECISION_WORDS.search(text):
                self.found.notes[f"heredoc on line {command.line}"] = None
        if name == "tee" and len(words) > 1:
            outputs = [("-a" in words, self.unknowns.shown(words[-1]))]
        elif name == "echo":
            text = " ".join(words[1:])
        elif name != "cat" or len(words) > 1:
            text = None
        if name in EDITORS:
            outputs += [(False, self.unknowns.shown(word)) for word in words[1:]]
        for append, target in outputs:
            self.files = written(self.files, target, text, command.line, append=append)

    def held(self) -> Launch:
        """Return the arguments that variables hold, for a file that others source."""
        holders: dict[str, list[str]] = {}
        for name, value in self.values.variables.items():
            words = value if isinstance(value, list) else value.split()
            if name not in self.values.stated and any(word.startswith("--") for word in words):
                holders[name] = [piece for word in words for piece in word.split()]
        texts = {name: " ".join(words) for name, words in holders.items()}
        merged = [
            name
            for name, text in texts.items()
            if not any(other != name and len(held) > len(text) and text in held for other, held in texts.items())
        ]
        return Launch(
            line=0,
            program=", ".join(merged),
            arguments=(*(word for name in merged for word in holders[name]), *self.stray),
            environment={name: self.unknowns.shown(value) for name, value in self.exported.items()},
            late=frozenset(name for name, value in self.exported.items() if is_unknown(value)),
            files=self.files,
            unknowns=self.unknowns,
        )


def _is_arithmetic(node: Node) -> bool:
    """Return whether a node is `(( ... ))`."""
    return node.type == "compound_statement" and node.children[0].type == "(("


def _cut(lines: list[str], end: int) -> str:
    """Return why a command ends on a line although the next one seems to go on with it; empty: nothing says why."""
    line = lines[end - 1] if 0 < end <= len(lines) else ""
    before = lines[end - 2] if 1 < end <= len(lines) else ""
    if re.search(r"\\[ \t]+$", line):
        return "a blank follows the backslash"
    if "#" in line and (line.rstrip().endswith("\\") or before.rstrip().endswith("\\")):
        return "a comment stands there" if line.lstrip().startswith("#") else "a comment hides the backslash"
    if before.endswith("\\") and not line.strip():
        return "the line behind the backslash is empty"
    if not line.endswith("\\"):
        return ""
    after = next((one for one in lines[end:] if one.strip()), "")
    return "a comment stands there" if after.lstrip().startswith("#") else "the line behind the backslash is empty"
