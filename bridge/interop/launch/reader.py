"""One reading of a launch script: its commands in source order, one environment, one branch of each condition."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Protocol

from bridge.errors import PayloadError
from bridge.interop.contract import Unmapped
from bridge.interop.launch.conditions import arithmetic, decided
from bridge.interop.launch.files import CONFIGURATION, Files
from bridge.interop.launch.launches import (
    COMMAND_WORDS,
    QUIET,
    SHELLS,
    Launch,
    found_launch,
    nested_script,
    started_script,
)
from bridge.interop.launch.relevance import PRECISION_WORDS
from bridge.interop.launch.syntax import (
    AndOr,
    Arithmetic,
    Array,
    Case,
    Command,
    Define,
    Group,
    If,
    Loop,
    Node,
    Not,
    Script,
    Test,
)
from bridge.interop.launch.values import Unknowns, Values, is_unknown, name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bridge.interop.launch.syntax import Assignment

__all__ = ["Assumptions", "Choice", "Reader", "Reading"]

MAX_STEPS = 20_000
"""Commands of one reading."""
MAX_DEPTH = 12
"""Of functions and strings within each other."""
MAX_SOURCED = 8
MAX_OPTIONS = 12
DECLARERS = frozenset({"export", "declare", "local", "readonly", "typeset"})
LOCAL = ("local", "declare", "typeset")
POSITIONAL = (*map(str, range(1, 10)), "@", "*", "#")
READERS = frozenset({"read", "mapfile", "readarray", "printf", "getopts"})
NAME = re.compile(r"[A-Za-z_]\w*")
EQUALITY = frozenset({"=", "==", "!="})
ARGUMENTS_BY_NAME = re.compile(r"ARG|OPT|FLAG|PARAM", re.IGNORECASE)


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


@dataclass(frozen=True, slots=True)
class _Condition:
    """A condition, as written, and what runs where it holds and where not."""

    nodes: list[Node]
    text: str
    line: int
    word: str
    body: list[Node]
    otherwise: list[Node]


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What one reading assumes."""

    stated: Mapping[str, str] = field(default_factory=dict)
    """What the user states of the run."""
    choices: tuple[Choice, ...] = ()
    open: frozenset[str] = frozenset()
    """Variables whose default in the script is not taken."""

    @property
    def assumed(self) -> dict[str, str]:
        """Values of variables that nothing sets."""
        return {name: value for choice in self.choices for name, value in choice.assumed}

    @property
    def forced(self) -> dict[str, bool]:
        """Conditions by their text, and whether they hold."""
        return {text: holds for choice in self.choices for text, holds in choice.forced}


@dataclass
class Reading:
    """What one reading finds."""

    launches: list[Launch] = field(default_factory=list)
    points: dict[str, tuple[str, list[Choice]]] = field(default_factory=dict)
    """Undecided condition -> the branch that was taken, as a report shows it, and the others."""
    defaulted: dict[str, str] = field(default_factory=dict)
    """Variables that nothing sets and whose default in the script was taken."""
    notes: list[str] = field(default_factory=list)
    scripts: list[Launch] = field(default_factory=list)
    """Other shell scripts that it starts."""


class Shared(Protocol):
    """What all readings of one script share."""

    unknowns: Unknowns

    def beside(self, name: str) -> str | None:
        """Return the text of a file next to the script, None where there is none."""

    def parsed(self, text: str) -> Script:
        """Return the commands of a string or file that is a script."""


class Reader:
    """Reads a script under some assumptions.

    Args:
        script: The script.
        path: What it is called in messages.
        given: What this reading assumes.
        shared: What all readings of the script share.
    """

    def __init__(self, script: Script, path: str, given: Assumptions, shared: Shared) -> None:
        self.script, self.path, self.shared = script, path, shared
        self.unknowns = unknowns = shared.unknowns
        self.given = given
        self.forced = given.forced
        self.values = Values(unknowns, given.stated, given.assumed, given.open)
        self.found = Reading(defaulted=self.values.defaulted)
        self.exported: dict[str, str] = {}
        self.files = Files(unknowns.shown)
        self.functions: dict[str, list[Node]] = {}
        self.called: set[str] = set()
        self.steps = self.depth = self.sourced = 0
        self.line = 0
        """The line of the script that a string or a sourced file stands on; 0: outside of one."""
        self.last: tuple[int, int] | None = None
        """The end of the command that started something just before, and which launch it was."""
        self.tested: set[str] = set()
        """Variables that nothing sets, as `[ -z "$X" ]` found."""
        self.stray: list[list[str]] = []

    def read(self) -> Reading:
        """Return what the script starts; without any launch, what its functions would, or its variables hold."""
        self.block(self.script.nodes)
        if not self.found.launches:
            for name, body in list(self.functions.items()):
                if name not in self.called:
                    self.block(body)
        if not self.found.launches and self.script.error:
            remedy = "Correct the script there."
            raise PayloadError(
                f"{self.path}, line {self.script.error}: must be bash that can be parsed, and is not. {remedy}"
            )
        if not self.found.launches:
            self.found.launches.append(self.held())
        notes = tuple(dict.fromkeys(self.found.notes))
        if self.script.error:
            notes = (*notes, f"line {self.script.error}, which is no bash")
        self.found.launches = [
            replace(launch, notes=tuple(dict.fromkeys((*notes, *launch.notes)))) for launch in self.found.launches
        ]
        return self.found

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
                self.note(f"what follows after {MAX_STEPS} commands")
                raise _Ended
            self.one(node)

    def one(self, node: Node) -> bool | None:
        """Read one command; return whether it succeeds as far as the file says."""
        if isinstance(node, Command):
            return self.command(node)
        if isinstance(node, If):
            self.conditional(node)
        elif isinstance(node, AndOr):
            return self.joined(node)
        elif isinstance(node, Case):
            self.case(node)
        elif isinstance(node, Loop):
            self.loop(node)
        elif isinstance(node, Group):
            self.run(node.body)
        elif isinstance(node, Define):
            self.functions[node.name] = node.body
        return None

    def note(self, text: str) -> None:
        """Note something that is not read."""
        if text not in self.found.notes:
            self.found.notes.append(text)

    # -- branches ----------------------------------------------------------------------------------------------------

    def conditional(self, node: If) -> None:
        """Read the branch of an `if` that is taken."""
        passed: list[tuple[str, int]] = []
        for place, (condition, text, line, body) in enumerate(node.branches):
            word = "elif" if place else "if"
            rest = node.otherwise if place + 1 == len(node.branches) else []
            if self.holds(_Condition(condition, text, line, word, body, rest)):
                self.run(body)
                return
            passed.append((text, line))
        self.run(node.otherwise)

    def holds(self, one: _Condition) -> bool:
        """Return whether a condition holds; where the file does not say, with nothing set.

        A branch that only ends the script is not taken.
        """
        nodes, body, otherwise = one.nodes, one.body, one.otherwise
        for node in nodes[:-1]:
            self.one(node)
        answer = self.answer(nodes[-1], sure=True) if nodes else True
        if answer is not None and not self.found.launches and self.ends(body if answer else otherwise):
            return not answer
        if answer is not None:
            return answer
        shown = self.unknowns.shown(one.text)
        line = self.line or one.line
        if self.ends(body):
            return False
        if self.ends(otherwise):
            return True
        default = bool(self.answer(nodes[-1], sure=False))
        labels = {True: f"line {line}, {one.word} {shown}", False: f"line {line}, not {shown}"}
        equal = self.equality(nodes[-1])
        if equal is not None:
            name, value = equal
            key = f"${name}"
            other = Choice(assumed=((name, value),), label=labels[not default])
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
        if isinstance(node, Not):
            return self.equality(node.node)
        words = self.test_words(node)
        if words is None or len(words) != 3 or words[1] not in EQUALITY:
            return None
        sides = (words[0], words[2]) if is_unknown(words[0]) else (words[2], words[0])
        name = name_of(self.unknowns.shown(sides[0])) if self.unknowns.is_unset(sides[0]) else ""
        value = sides[1].replace("*", "")
        return (name, value) if name and not is_unknown(value) and value else None

    def test_words(self, node: Node) -> list[str] | None:
        """Return the words of a test without its brackets."""
        if isinstance(node, Test):
            return [self.values.text(word) for word in node.words]
        if isinstance(node, Command) and node.words:
            words = [self.values.text(word) for word in node.words]
            if words[0] in ("test", "["):
                return words[1:-1] if words[0] == "[" else words[1:]
        return None

    def answer(self, node: Node, *, sure: bool) -> bool | None:
        """Return whether a command succeeds: None where the file does not say, unless a guess will do."""
        if isinstance(node, Not):
            inner = self.answer(node.node, sure=sure)
            return None if inner is None else not inner
        if isinstance(node, AndOr):
            left, right = self.answer(node.left, sure=sure), self.answer(node.right, sure=sure)
            strong = node.operator == "||"
            if strong in (left, right):
                return strong
            return None if None in (left, right) else not strong
        if isinstance(node, Group) and len(node.body) == 1:
            return self.answer(node.body[0], sure=sure)
        words = self.test_words(node)
        if words is not None:
            if not sure:
                words = [self.unknowns.with_nothing_set(word) for word in words]
                return decided(words, double=isinstance(node, Test) and node.is_double) or False
            if len(words) == 2 and words[0] == "-z" and self.unknowns.is_unset(words[1]):
                self.tested.add(name_of(self.unknowns.shown(words[1])))
            return decided(words, double=isinstance(node, Test) and node.is_double)
        if isinstance(node, Arithmetic):
            return arithmetic(node.text, self.values) if sure else False
        if isinstance(node, Command) and node.words:
            first = node.words[0][0].text if len(node.words[0]) == 1 and not node.words[0][0].name else ""
            if first in ("true", ":", "false"):
                return first != "false"
            if sure:
                self.command(node)
        return None if sure else False

    def joined(self, node: AndOr) -> bool | None:
        """Read `left && right` or `left || right`; return whether it succeeds."""
        wanted = node.operator == "&&"
        if isinstance(node.left, Test | Arithmetic | Not) or (isinstance(node.left, AndOr) and self.is_test(node.left)):
            body, otherwise = ([node.right], []) if wanted else ([], [node.right])
            condition = _Condition([node.left], node.text, node.line, "if", body, otherwise)
            if self.holds(condition) == wanted:
                return self.one(node.right)
            return not wanted
        status = self.one(node.left)
        if status is None:
            status = True  # a command that is not known to fail
        if status == wanted:
            return self.one(node.right)
        return status

    def is_test(self, node: Node) -> bool:
        """Return whether a node is nothing but tests."""
        if isinstance(node, AndOr):
            return self.is_test(node.left) and self.is_test(node.right)
        return isinstance(node, Test | Arithmetic) or (isinstance(node, Not) and self.is_test(node.node))

    def ends(self, body: list[Node], depth: int = 0) -> bool:
        """Return whether a branch ends the script and starts nothing."""
        for node in body:
            if isinstance(node, Group) and self.ends(node.body, depth):
                return True
            if not isinstance(node, Command) or not node.words:
                continue
            first = node.words[0][0].text if node.words[0] else ""
            if first in ("exit", "return"):
                return True
            if first in self.functions and depth < 3 and self.ends(self.functions[first], depth + 1):
                return True
            if COMMAND_WORDS.search(" ".join(part.text for word in node.words for part in word)) and first not in QUIET:
                return False
        return False

    def case(self, node: Case) -> None:
        """Read the arm of a `case` that is taken."""
        subject = self.values.text(node.subject)
        name = name_of(self.unknowns.shown(subject)) if self.unknowns.is_unset(subject) else ""
        plain = self.unknowns.with_nothing_set(subject)
        taken: int | None = None
        others: list[Choice] = []
        labels = []
        late = is_unknown(subject)
        shown = self.unknowns.shown(subject)
        key = f"${name}" if name else shown
        for place, (patterns, text, line, body) in enumerate(node.arms):
            texts = [self.values.text(pattern) for pattern in patterns]
            labels.append(f"line {self.line or line}, if case {shown} in {text})")
            forced = self.forced.get(f"{key} in {text}")
            matches = forced if forced is not None else any(fnmatchcase(plain, pattern) for pattern in texts)
            if late and self.ends(body):
                continue
            if matches and taken is None:
                taken = place
                if not late:
                    break
            elif late and "*" not in texts:
                literal = next((one.replace("*", "") for one in texts if one), "")
                if name and literal and not is_unknown(literal):
                    others.append(Choice(assumed=((name, literal),), label=labels[-1]))
                else:
                    others.append(Choice(forced=((f"{key} in {text}", True),), label=labels[-1]))
        if others:
            neither = " nor ".join(text for _, text, _, _ in node.arms)
            is_none = (
                f"line {self.line or node.line}, case {shown} is {'neither' if len(node.arms) > 1 else 'not'} {neither}"
            )
            known = self.found.points.setdefault(key, (labels[taken] if taken is not None else is_none, []))[1]
            known += [one for one in others[: MAX_OPTIONS - len(known)] if one not in known]
        if taken is not None:
            self.run(node.arms[taken][3])

    def loop(self, node: Loop) -> None:
        """Read the body of a loop once, with the first value of its variable."""
        if node.variable:
            items = self.values.all_words(node.items)
            name = node.variable
            if not items or name in self.given.stated:
                self.values.set(name, self.values.unknown(name))
            else:
                key = f"for {name} on {self.line or node.line}"
                chosen = dict(choice.forced[0] for choice in self.given.choices if choice.forced)
                at = next((place for place, item in enumerate(items) if chosen.get(f"{key} = {item}")), 0)
                label = f"line {self.line or node.line}, {name}={{}}"
                if len(items) > 1 and not any(map(is_unknown, items)):
                    options = [
                        Choice(forced=((f"{key} = {item}", True),), label=label.format(item))
                        for place, item in enumerate(items[:MAX_OPTIONS])
                        if place != at
                    ]
                    self.found.points.setdefault(key, (label.format(items[at]), options))
                self.values.set(name, items[at])
        self.run(node.body)

    # -- commands ----------------------------------------------------------------------------------------------------

    def command(self, node: Command) -> bool | None:
        """Read a simple command, a declaration or assignments; return whether it succeeds where that is known."""
        values = self.values
        words = values.all_words(node.words)
        first = words[0] if words else ""
        last, self.last = self.last, None
        if first in DECLARERS:
            self.declare(node, words)
            return True
        before = {one.name: values.variables.get(one.name) for one in node.assignments} if words else {}
        prefix: dict[str, str] = {}
        for one in node.assignments:
            self.assign(one, prefix)
        if not words:
            self.exported |= {name: value for name, value in prefix.items() if name in self.exported}
            return True
        status = self.simple(node, words, prefix, last)
        for name, value in before.items():  # `NAME=value command` sets it for the command only
            if value is None:
                values.variables.pop(name, None)
            else:
                values.variables[name] = value
        return status

    def simple(
        self, node: Command, words: list[str], prefix: Mapping[str, str], last: tuple[int, int] | None
    ) -> bool | None:
        """Read one command by its expanded words."""
        first = words[0]
        if first in ("true", "false", ":"):
            return first != "false"
        if first in ("exit", "return"):
            raise _Ended
        if self.continues(words, last):
            self.lost(node, words, last)
        elif first in ("source", "."):
            self.source(words, node.line)
        elif first == "eval":
            self.nested(" ".join(words[1:]), node.line)
        elif first == "unset":
            for name in words[1:]:
                self.values.variables.pop(name, None)
        elif first == "shift":
            self.shift(words)
        elif first in READERS:
            self.unread(words)
        elif first in self.functions:
            self.call(first, words)
        else:
            self.launch(node, words, prefix)
            self.write(node, words)
        return None

    def declare(self, node: Command, words: list[str]) -> None:
        """Read `export NAME=value` and its kin."""
        declared: dict[str, str] = {}
        for one in node.assignments:
            self.assign(one, declared)
        switches = "".join(word[1:] for word in words[1:] if word.startswith("-"))
        for word in words[1:]:
            name, equals, value = word.partition("=")
            if NAME.fullmatch(name) and equals:
                self.values.set(name, value)
                declared[name] = value
            elif NAME.fullmatch(name) and words[0] == "export" and name in self.values.variables:
                held = self.values.variables[name]
                declared[name] = held if isinstance(held, str) else " ".join(held)
        if words[0] == "export" or "x" in switches:
            self.exported |= declared

    def assign(self, one: Assignment, into: dict[str, str]) -> None:
        """Set a variable; scalars are noted in `into`."""
        values = self.values
        if isinstance(one.value, Array):
            items = values.all_words(one.value.words)
            if one.name in values.stated and not one.append and items and all(map(is_unknown, items)):
                items = values.stated[one.name].split()
            values.set(one.name, items, append=one.append)
            return
        taken = values.taken
        text = values.text(one.value)
        if one.name in values.stated and values.taken > taken and not one.append:
            text = values.stated[one.name]
        if one.index:
            held = values.variables.get(one.name)
            if isinstance(held, list) and one.index.isdigit() and int(one.index) < len(held):
                values.set(one.name, [*held[: int(one.index)], text, *held[int(one.index) + 1 :]])
            else:
                values.set(one.name, [*(held if isinstance(held, list) else []), text])
            return
        if one.name in self.tested and one.name not in values.variables and not one.append:
            if one.name in values.open:
                text = values.unknown(one.name)
            else:
                values.defaulted.setdefault(one.name, text)
        values.set(one.name, text, append=one.append)
        held = values.variables.get(one.name)
        if isinstance(held, str):
            into[one.name] = held

    def shift(self, words: list[str]) -> None:
        """Drop the first arguments of a function; those of the script are not known."""
        variables = self.values.variables
        held = variables.get("@")
        if isinstance(held, list):
            count = int(words[1]) if len(words) > 1 and words[1].isdigit() else 1
            self.give(held[count:])

    def give(self, arguments: list[str]) -> None:
        """Set the arguments of a function."""
        variables = self.values.variables
        for place in POSITIONAL:
            variables.pop(place, None)
        variables |= {str(place): word for place, word in enumerate(arguments[:9], 1)}
        variables |= {"@": arguments, "*": " ".join(arguments), "#": str(len(arguments))}

    def unread(self, words: list[str]) -> None:
        """Make the variables that `read` and its kin set unknown."""
        names = words[1:] if words[0] != "printf" else words[2:3] if words[1:2] == ["-v"] else []
        for name in names:
            if NAME.fullmatch(name):
                self.values.set(name, self.values.unknown(name))

    def continues(self, words: list[str], last: tuple[int, int] | None) -> bool:
        """Return whether what should be a command is the rest of one that a line end cut off."""
        if words[0].startswith("-") and len(words[0]) > 1:
            return True
        if last is None or not is_unknown(words[0]) or not all(map(is_unknown, words[:1])):
            return False
        return bool(self.cut(last[0])) and bool(ARGUMENTS_BY_NAME.search(self.unknowns.shown(words[0])))

    def cut(self, end: int) -> str:
        """Return why a command ends on a line although the next one seems to go on with it; empty: nothing says why."""
        lines = self.script.lines
        line = lines[end - 1] if 0 < end <= len(lines) else ""
        before = lines[end - 2] if 1 < end <= len(lines) else ""
        if re.search(r"\\[ \t]+$", line):
            return "a blank follows the backslash"
        if "#" in line and (line.rstrip().endswith("\\") or before.rstrip().endswith("\\")) and "#" in line:
            return "a comment stands there" if line.lstrip().startswith("#") else "a comment hides the backslash"
        if re.search(r"\\$", before) and not line.strip():
            return "the line behind the backslash is empty"
        if re.search(r"\\$", line):
            after = next((one for one in lines[end:] if one.strip()), "")
            return (
                "a comment stands there" if after.lstrip().startswith("#") else "the line behind the backslash is empty"
            )
        return ""

    def lost(self, node: Command, words: list[str], last: tuple[int, int] | None) -> None:
        """Record options that stand where a command should."""
        if last is None:
            self.stray.append(words)
            return
        end, at = last
        why = self.cut(end) or self.cut(max(end, node.line - 1)) or "no backslash ends the line"
        detail = f"{why}, so that bash ends the command and the flags behind it are not passed"
        value = self.unknowns.shown(" ".join(words))
        loss = Unmapped(
            field=f"line continuation on line {end}",
            value=value,
            reason="dead knob",
            detail=detail,
            remedy="Repair the line end, or drop what follows it.",
        )
        launch = self.found.launches[at]
        self.found.launches[at] = replace(launch, unmapped=(*launch.unmapped, loss))
        self.last = (node.end, at)

    def call(self, name: str, words: list[str]) -> None:
        """Read the body of a function with its arguments."""
        self.called.add(name)
        if self.depth >= MAX_DEPTH:
            return
        variables = self.values.variables
        before = {place: variables[place] for place in POSITIONAL if place in variables}
        self.give(words[1:])
        local = {one: variables.get(one) for one in _locals(self.functions[name])}
        self.depth += 1
        try:
            self.block(self.functions[name])
        finally:
            self.depth -= 1
        for place in (*POSITIONAL, *local):
            variables.pop(place, None)
        variables |= before | {one: value for one, value in local.items() if value is not None}

    def source(self, words: list[str], line: int) -> None:
        """Read a file that stands beside the script in the same environment; note any other."""
        shown = self.unknowns.shown(" ".join(words[1:2]))
        text = self.shared.beside(words[1]) if len(words) > 1 and self.sourced < MAX_SOURCED else None
        if text is None:
            self.note(f"source {shown}")
            return
        self.sourced += 1
        try:
            nodes = self.shared.parsed(text).nodes
        except PayloadError:
            self.note(f"source {shown}")
            return
        before, self.line = self.line, self.line or line
        try:
            self.block(nodes)
        finally:
            self.line = before

    def nested(self, text: str, line: int) -> bool:
        """Read a string that is a script; return whether it starts something."""
        if self.depth >= MAX_DEPTH or not COMMAND_WORDS.search(text):
            return False
        count = len(self.found.launches)
        before, self.line = self.line, self.line or line
        self.depth += 1
        try:
            self.block(self.shared.parsed(text).nodes)
        except PayloadError:
            self.note(f"the string on line {line}")
        finally:
            self.depth -= 1
            self.line = before
        return len(self.found.launches) > count

    # -- launches ----------------------------------------------------------------------------------------------------

    def launch(self, node: Command, words: list[str], prefix: Mapping[str, str]) -> None:
        """Note what a command starts."""
        inner = nested_script(words)
        if inner is not None and self.nested(inner, node.line):
            return
        environment = {**self.exported, **prefix}
        started, other = found_launch(words), started_script(words, environment)
        if other is not None:
            runner, program, arguments, trains = other
            note = f"script {self.unknowns.shown(program)}"
            made = self.made(node, (runner, program, arguments), environment, notes=(note,))
            if (started is not None and started[1] in (program, words[0])) or (trains and started is None):
                self.add(made, node)
                return
            if started is None:
                self.found.scripts.append(made)
                return
        if started is not None:
            self.add(self.made(node, started, environment), node)

    def made(
        self,
        node: Command,
        started: tuple[list[str], str, list[str]],
        environment: Mapping[str, str],
        notes: tuple[str, ...] = (),
    ) -> Launch:
        """Return a launch."""
        runner, program, arguments = started
        late = frozenset(name for name, value in environment.items() if is_unknown(value))
        line = self.line or node.line
        return Launch(
            line=line,
            program=self.unknowns.shown(program),
            arguments=tuple(arguments),
            runner=tuple(runner),
            environment={name: self.unknowns.shown(value) for name, value in environment.items()},
            late=late,
            notes=notes,
            files=self.files.known,
            place=sum(one.line == line for one in self.found.launches),
            unknowns=self.unknowns,
        )

    def add(self, launch: Launch, node: Command) -> None:
        """Add a launch."""
        self.found.launches.append(launch)
        self.last = (node.end, len(self.found.launches) - 1)

    def write(self, node: Command, words: list[str]) -> None:
        """Follow what a command writes: a file, or a script that a shell reads."""
        shown = self.unknowns.shown
        name = PurePosixPath(words[0]).name
        if node.body is not None:
            text = self.values.text(node.body)
            if name in SHELLS or name in ("sbatch", "srun", "ssh", "qsub", "bsub"):
                self.nested(text, node.line)
                return
            for sign, target in node.outputs:
                if CONFIGURATION.search(shown(self.values.text(target))) and PRECISION_WORDS.search(text):
                    self.note(f"heredoc on line {node.line}")
                if name == "cat" and len(words) == 1:
                    self.files.write(self.values.text(target), text, node.line, append=sign == ">>")
                else:
                    self.files.make([shown(self.values.text(target))], [words], node.line)
            if name == "tee" and len(words) > 1:
                self.files.write(words[-1], text, node.line, append="-a" in words)
            return
        self.files.run(words, node.line)
        for sign, target in node.outputs:
            if name == "echo":
                self.files.write(self.values.text(target), " ".join(words[1:]), node.line, append=sign == ">>")
            else:
                self.files.make([shown(self.values.text(target))], [words], node.line)

    def held(self) -> Launch:
        """Return the arguments that variables hold, for a file that others source."""
        holders: dict[str, list[str]] = {}
        for name, value in self.values.variables.items():
            words = value if isinstance(value, list) else value.split()
            if name not in self.given.stated and any(word.startswith("--") for word in words):
                holders[name] = [piece for word in words for piece in word.split()]
        texts = {name: " ".join(words) for name, words in holders.items()}
        merged = [
            name
            for name, text in texts.items()
            if not any(other != name and len(held) > len(text) and text in held for other, held in texts.items())
        ]
        arguments = [word for name in merged for word in holders[name]]
        arguments += [word for words in self.stray for word in words]
        notes = tuple(f"script {script.program}" for script in self.found.scripts)
        return Launch(
            line=0,
            program=", ".join(merged),
            arguments=tuple(arguments),
            environment={name: self.unknowns.shown(value) for name, value in self.exported.items()},
            late=frozenset(name for name, value in self.exported.items() if is_unknown(value)),
            notes=notes,
            files=self.files.known,
            unknowns=self.unknowns,
        )


def _locals(body: Iterable[Node]) -> set[str]:
    """Return the names that a function declares for itself at its top level."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, Group):
            found |= _locals(node.body)
        elif (
            isinstance(node, Command) and node.words and node.words[0] and node.words[0][0].text in ("local", "declare")
        ):
            found |= {one.name for one in node.assignments}
            found |= {word[0].text for word in node.words[1:] if word and NAME.fullmatch(word[0].text)}
    return found
