"""One reading of a launch script: its commands in source order, one environment, one branch of each condition."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from bridge.errors import PayloadError
from bridge.interop.contract import Unmapped
from bridge.interop.launch.files import CONFIGURATION, WrittenFile
from bridge.interop.launch.launches import (
    COMMAND_WORDS,
    MODES,
    PRECISION_WORDS,
    QUIET,
    SHELLS,
    STATING,
    UNREADABLE,
    Launch,
    found_launch,
    nested_script,
)
from bridge.interop.launch.script import COMMANDS, WORDS, statements
from bridge.interop.launch.variables import Variables, is_unknown, name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tree_sitter import Node

    from bridge.interop.launch.files import Sources
    from bridge.interop.launch.script import Script
    from bridge.interop.launch.variables import Value

MAX_STEPS = 10_000
"""Commands of one reading."""
MAX_DEPTH = 12
"""Of functions and strings within each other."""
MAX_SOURCED = 8
MAX_OPTIONS = 12
DECLARERS = frozenset({"export", "declare", "local", "readonly", "typeset"})
POSITIONAL = (*map(str, range(1, 10)), "@", "*", "#")
NAME = re.compile(r"[A-Za-z_]\w*")
EQUALITY = frozenset({"=", "==", "!="})
NUMERIC = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
INTEGER = re.compile(r"\s*-?\d{1,18}\s*")
CONTAINERS = frozenset({"compound_statement", "subshell", "pipeline", "do_group", "else_clause", "ERROR"})
LOOPS = frozenset({"for_statement", "while_statement", "c_style_for_statement"})
EDITORS = frozenset({"sed", "cp", "mv"})
READ_A_SCRIPT = SHELLS | {"sbatch", "srun", "ssh", "qsub", "bsub"}


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


FIRST = Choice()
"""The branches that bash takes with nothing set."""


class Reader:
    """Reads a script under some assumptions.

    Args:
        sources: The script, and what all its readings share.
        stated: What the user states of the run.
        choice: The branch that is taken otherwise.
        open_: A variable whose default in the script is not taken.
    """

    def __init__(self, sources: Sources, stated: Mapping[str, str], choice: Choice = FIRST, open_: str = "") -> None:
        self.sources, self.script, self.unknowns = sources, sources.script, sources.unknowns
        self.forced = dict(choice.forced)
        self.values = Variables(sources.unknowns, stated, dict(choice.assumed), open_)
        self.launches: list[Launch] = []
        self.points: dict[str, tuple[str, list[Choice]]] = {}
        """Undecided condition -> the branch that was taken, as a report shows it, and the others."""
        self.notes: dict[str, None] = {}
        """What is not read, in order."""
        self.exported: dict[str, str] = {}
        self.files: Mapping[str, WrittenFile] = {}
        self.functions: dict[str, tuple[Script, Node]] = {}
        self.steps = self.depth = self.sourced = 0
        self.line = 0
        """The line of the script that a string or a sourced file stands on; 0: outside of one."""
        self.executed: set[int] = set()
        """Identifiers of the commands that were read, and of branches that a known value rules out."""
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
            (flag not in MODES, place > 0, line, flag, is_branch)
            for place, script in enumerate((self.sources.script, *self.sources.inner))
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
        elif kind in CONTAINERS and not _is_arithmetic(node):
            self.run(statements(node))
        return None

    def text(self, node: Node) -> str:
        """Return a word as one text."""
        return self.values.text(self.script, node)

    # -- branches ----------------------------------------------------------------------------------------------------

    def conditional(self, node: Node) -> None:
        """Read the branch of an `if` that is taken."""
        clauses = [node, *(child for child in node.children if child.type == "elif_clause")]
        otherwise = [child for child in node.children if child.type == "else_clause"]
        taken = self.values.taken
        for place, clause in enumerate(clauses):
            then = next((at for at, child in enumerate(clause.children) if child.type == "then"), 0)
            condition = [child for child in clause.children[:then] if child.is_named and child.type != "comment"]
            body = [child for child in statements(clause) if child.start_byte >= clause.children[then].start_byte]
            body = [child for child in body if child.type not in ("elif_clause", "else_clause")]
            rest = [*otherwise, *clauses[place + 1 :]]
            word = "elif" if place else "if"
            if self.holds(condition, clause, word, body, otherwise if clause is clauses[-1] else []):
                self.rule_out(rest, condition, taken)
                self.run(body)
                return
            self.rule_out(body, condition, taken)
        self.run(otherwise)

    def rule_out(self, branches: list[Node], condition: list[Node], taken: int) -> None:
        """Note branches that no run takes: the values that the condition reads are known, and no defaults."""
        words = self.test_words(condition[-1]) if condition and self.values.taken == taken else None
        if words is not None and not any(map(is_unknown, words)):
            self.executed |= {branch.id for branch in branches}

    def holds(self, condition: list[Node], at: Node, word: str, body: list[Node], otherwise: list[Node]) -> bool:
        """Return whether a condition holds; where the file does not say, with nothing set.

        A branch that only ends the script is not taken.
        """
        for node in condition[:-1]:
            self.one(node)
        answer = self.answer(condition[-1], sure=True) if condition else True
        if answer is not None:
            return answer != (not self.launches and self.ends(body if answer else otherwise))
        if self.ends(body):
            return False
        if self.ends(otherwise):
            return True
        shown = self.unknowns.shown(" ".join(self.script.text(condition[0], condition[-1]).split()))
        line = self.line or at.start_point.row + 1
        default = bool(self.answer(condition[-1], sure=False))
        labels = {True: f"line {line}, {word} {shown}", False: f"line {line}, not {shown}"}
        equal, key = self.equality(condition[-1]), shown
        if equal is not None:
            key, other = f"${equal[0]}", Choice(assumed=(equal,), label=labels[not default])
        else:
            default = self.forced.get(key, default)
            other = Choice(forced=((key, not default),), label=labels[not default])
        self.branch(key, labels[default], [other])
        return default

    def branch(self, key: str, taken: str, others: list[Choice]) -> None:
        """Note the branches that may be taken otherwise at a condition."""
        known = self.points.setdefault(key, (taken, []))[1]
        known += [one for one in others[: MAX_OPTIONS - len(known)] if one not in known]

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
            script = self.script
            return [self.text(one) if one.type in WORDS else script.text(one) for one in script.test(node)]
        if node.type == "command" and self.script.name(node) == "test":
            return [self.text(one) for one in node.children[1:] if one.type in WORDS]
        return None

    def answer(self, node: Node, *, sure: bool) -> bool | None:
        """Return whether a command succeeds: None where the file does not say, unless a guess will do."""
        if node.type == "negated_command":
            inner = self.answer(node.named_children[-1], sure=sure)
            return None if inner is None else not inner
        if node.type == "list":
            return _either(
                node.children[1].type == "||", *(self.answer(node.children[at], sure=sure) for at in (0, -1))
            )
        words = self.test_words(node)
        if words is not None:
            is_double = node.children[0].type == "[["
            if sure:
                return _decided(words, double=is_double)
            return _decided([self.unknowns.with_nothing_set(word) for word in words], double=is_double) or False
        if node.type == "redirected_statement":
            return self.answer(node.named_children[0], sure=sure)
        if node.type in ("command", "pipeline") and sure:
            return self.one(node)
        return None if sure else node.type == "command" and self.script.name(node) in ("true", ":")

    def joined(self, node: Node) -> bool | None:
        """Read `left && right` or `left || right`; return whether it succeeds."""
        left, right, wanted = node.children[0], node.children[-1], node.children[1].type == "&&"
        if _is_test(left):
            taken = self.values.taken
            if self.holds([left], node, "if", *(([right], []) if wanted else ([], [right]))) == wanted:
                return self.one(right)
            self.rule_out([right], [left], taken)
            return not wanted
        status = self.one(left) is not False  # a command that is not known to fail
        return self.one(right) if status == wanted else status

    def ends(self, body: list[Node], script: Script | None = None, depth: int = 0) -> bool:
        """Return whether a branch ends the script and starts nothing."""
        script = script or self.script
        for node in body:
            if node.type in CONTAINERS and self.ends(statements(node), script, depth):
                return True
            inner = node.named_children[0] if node.type == "redirected_statement" else node
            if inner.type != "command":
                continue
            first = script.name(inner)
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
        before = self.values.taken
        (subject,) = map(self.text, node.children_by_field_name("value"))
        is_known = not is_unknown(subject)
        shown, plain = self.unknowns.shown(subject), self.unknowns.with_nothing_set(subject)
        name = name_of(shown) if self.unknowns.is_unset(subject) else ""
        key = f"${name}" if name else shown
        taken, label = None, ""
        others: list[Choice] = []
        heads: list[str] = []
        for item in node.named_children:
            if item.type != "case_item":
                continue
            patterns = item.children_by_field_name("value")
            heads.append(" ".join(self.script.text(patterns[0], patterns[-1]).split()))
            texts = [self.text(pattern) for pattern in patterns if pattern.type in WORDS]
            body = item.named_children[len(patterns) :]
            own = f"line {self.line or item.start_point.row + 1}, if case {shown} in {heads[-1]})"
            arm = f"{key} in {heads[-1]}"
            if not is_known and self.ends(body):
                continue
            if taken is None and self.forced.get(arm, any(fnmatchcase(plain, pattern) for pattern in texts)):
                taken, label = body, own
            elif is_known and before == self.values.taken:
                self.executed.add(item.id)
            elif not is_known and "*" not in texts:
                literal = next((one.replace("*", "") for one in texts if one), "")
                is_value = bool(name and literal and not is_unknown(literal))
                choice = Choice(assumed=((name, literal),)) if is_value else Choice(forced=((arm, True),))
                others.append(replace(choice, label=own))
        if others:
            neither = f"{'neither' if len(heads) > 1 else 'not'} {' nor '.join(heads)}"
            label = label or f"line {self.line or node.start_point.row + 1}, case {shown} is {neither}"
            self.branch(key, label, others)
        self.run(taken or ())

    def loop(self, node: Node) -> None:
        """Read the body of a loop once, with the first value of its variable."""
        if node.type == "for_statement":
            (name,) = map(self.script.text, node.children_by_field_name("variable"))
            given = [one for one in node.children_by_field_name("value") if one.type in WORDS]
            items = self.values.words(self.script, given)
            is_known = items and name not in self.values.stated
            value = items[0] if is_known else self.values.mark(f"${name}", is_unset=True)
            self.values.set(name, value, soft=len(items) > 1)
        self.run(node.children_by_field_name("body"))

    # -- commands ----------------------------------------------------------------------------------------------------

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

    def expanded(self, node: Node, redirects: list[Node]) -> list[str]:
        """Return the words of a command, those behind a redirection too."""
        words: list[str] = []
        for child in () if node.type == "variable_assignment" else node.children:
            if child.type == "command_name":
                words += self.values.words(self.script, child.children[:1])
            elif child.type in WORDS:
                words += self.values.words(self.script, [child])
            elif child.type in ("=", "==") or (not child.is_named and child.type != "$"):
                words.append(self.script.text(child))
        for redirect in redirects:
            words += self.values.words(self.script, _targets(redirect)[1:])
        return words

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

    def declare(self, words: list[str], declared: dict[str, str]) -> None:
        """Read `export NAME=value` and its kin."""
        for word in words[1:]:
            name, equals, value = word.partition("=")
            if NAME.fullmatch(name) and equals:
                self.values.set(name, value)
                declared[name] = value
            elif words[0] == "export" and name in self.values.values:
                held = self.values.values[name]
                declared[name] = held if isinstance(held, str) else " ".join(held)
        if words[0] == "export" or any(word.startswith("-") and "x" in word for word in words[1:]):
            self.exported |= declared

    def assigned(self, node: Node) -> dict[str, str]:
        """Set the variables of a command; return those that hold a text."""
        values, found = self.values, {}
        for one in [node] if node.type == "variable_assignment" else node.children:
            if one.type != "variable_assignment":
                continue
            name, _, index = self.script.text(one.children[0]).partition("[")
            given = one.child_by_field_name("value")
            append, taken = len(one.children) > 1 and one.children[1].type == "+=", values.taken
            value: Value = "" if given is None else self.text(given)
            if given is not None and given.type == "array":
                value = values.words(self.script, [child for child in given.named_children if child.type in WORDS])
            elif index:
                value, append = [str(value)], True
            values.set(name, value, append=append, soft=values.taken > taken)
            held = values.values[name]
            if isinstance(held, str):
                found[name] = held
        return found

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

    # -- launches ----------------------------------------------------------------------------------------------------

    def launch(self, line: int, end: int, words: list[str], prefix: Mapping[str, str]) -> None:
        """Note what a command starts."""
        inner = nested_script(words)
        if inner is not None and self.nested(inner, line):
            return
        started = found_launch(words)
        if started is None:
            return
        runner, program, arguments = started
        line = self.line or line
        self.last = (end, len(self.launches))
        place = sum(one.line == line for one in self.launches)
        made = self.made(line, self.unknowns.shown(program), arguments, prefix)
        self.launches.append(replace(made, runner=tuple(runner), place=place))

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

    def redirected(self, redirects: list[Node]) -> tuple[str | None, list[tuple[bool, str]]]:
        """Return the text that a command reads, and the files that it writes with whether it appends."""
        text = None
        outputs: list[tuple[bool, str]] = []
        for redirect in redirects:
            for target in _targets(redirect)[:1]:
                body = self.script.body(target)
                sign = next((child.type for child in redirect.children if not child.is_named), "")
                is_error = (
                    redirect.children[0].type == "file_descriptor" and self.script.text(redirect.children[0]) != "1"
                )
                if body is not None:
                    text = body[0] if body[1] else self.values.heredoc(body[0])
                elif redirect.type == "herestring_redirect":
                    text = self.text(target)
                elif sign in (">", ">>", ">|", "&>") and not is_error:
                    outputs.append((sign == ">>", self.unknowns.shown(self.text(target))))
        return text, outputs

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


def _targets(redirect: Node) -> list[Node]:
    """Return the words of a redirection: its file first."""
    return [child for child in redirect.named_children if child.type in WORDS]


def _is_arithmetic(node: Node) -> bool:
    return node.type == "compound_statement" and node.children[0].type == "(("


def _is_test(node: Node) -> bool:
    if node.type == "list":
        return _is_test(node.children[0]) and _is_test(node.children[-1])
    return node.type in ("test_command", "negated_command") or _is_arithmetic(node)


def _either(strong: bool, *sides: bool | None) -> bool | None:
    """Return what two sides of `||` (`strong` is True) or `&&` (False) say together."""
    if strong in sides:
        return strong
    return None if None in sides else not strong


def _decided(words: list[str], *, double: bool) -> bool | None:
    """Return what the words inside `[ ... ]` or, with `double`, `[[ ... ]]` say; None where only the run decides."""
    for joint, strong in ((("||", "-o"), True), (("&&", "-a"), False)):
        for word in joint:
            if word in words[1:-1]:
                place = words.index(word, 1)
                return _either(strong, *(_decided(side, double=double) for side in (words[:place], words[place + 1 :])))
    words = [word for word in words if word not in ("(", ")")]
    if words[:1] == ["!"]:
        inner = _decided(words[1:], double=double)
        return None if inner is None else not inner
    if any(map(is_unknown, words)):
        return None
    if len(words) == 1:
        return bool(words[0])
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return bool(words[1]) == (words[0] == "-n")
    if len(words) != 3:
        return None
    left, sign, right = words
    if sign in EQUALITY:
        equal = fnmatchcase(left, right) if double else left == right
        return equal == (sign != "!=")
    if sign == "=~" and re.fullmatch(r"[\w^$-]+", right):
        return re.search(right, left) is not None
    if sign in NUMERIC and INTEGER.fullmatch(left) and INTEGER.fullmatch(right):
        return bool(NUMERIC[sign](int(left), int(right)))
    return None
