"""`Reader`: one pass over the tree of a script, as bash would go with nothing set but what is stated.

A condition that the file does not decide is a question: `alternatives` asks for the same pass with another answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bridge.errors import PayloadError
from bridge.interop.launch import launches as starts
from bridge.interop.launch.conditions import Test, answer, matched
from bridge.interop.launch.job import is_job, job_environment
from bridge.interop.launch.script import WORDS, name_of, parse, statements, text_of
from bridge.interop.launch.variables import Variables
from bridge.interop.launch.word import DEFAULT, UNKNOWN, Word, variable_of
from bridge.interop.reading.document import Document

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_STEPS = 12_000
"""Commands."""
MAX_DEPTH = 12
"""Of functions, strings and sourced files within each other."""
NAME = re.compile(r"[A-Za-z_]\w*")
DECLARERS = frozenset({"export", "declare", "local", "readonly", "typeset"})
COMMANDS = frozenset({"command", "variable_assignment", "variable_assignments", "declaration_command", "unset_command"})
CONTAINERS = frozenset({"compound_statement", "subshell", "pipeline", "do_group", "else_clause", "ERROR"})
LOOPS = frozenset({"for_statement", "while_statement", "c_style_for_statement"})
HEREDOC = ("heredoc_start", "heredoc_body")
READERS = frozenset({"cat", "echo", "ls", "head", "mkdir", "jq"})
"""Commands that change no file which they name."""
NO_BODY = ("comment", "elif_clause", "else_clause")
ANSWERS = {"true": True, ":": True, "false": False}


class Arm(NamedTuple):
    """A condition with its answer, and the commands that it decides about."""

    test: Test
    text: str
    """The condition as it is written."""
    line: int
    body: Sequence[Node]
    word: str = "if"

    def label(self, *, holds: bool) -> str:
        """The branch where it holds, or where not."""
        return f"line {self.line}, {self.word if holds else 'not'} {self.text}"


class Reader(Variables):
    """What bash knows at a point of a script, and what it started before."""

    def __init__(self, root: Node, path: str, stated: Mapping[str, str], answers: Mapping[str, bool]) -> None:
        super().__init__(stated)
        self.path, self.answers = path, answers
        self.scripts = [root]
        """The script, and the strings and files in it that are scripts."""
        self.questions: dict[object, tuple[Arm, str]] = {}
        """Conditions that the file does not decide, each with the branch that is taken."""
        self.exported: dict[str, None] = {}
        self.functions: dict[str, Node] = {}
        self.launches: list[starts.Launch] = []
        self.notes: dict[str, None] = {}
        """What was not read."""
        self.files: dict[str, str] = {}
        """Name of a file that `cat` has written from a here-document -> its text."""
        self.executed: set[int] = set()
        """Nodes of the commands that were read."""
        self.stray: list[Word] = []
        """Options that stand where a command should."""
        self.has_failed = False
        """The last command was `false`, or a condition that did not hold."""
        self.end = ""
        """`exit` or `return` where the script, or a function, has ended."""
        self.line = 0
        """The line of the script that a string or a sourced file stands on; 0: outside of one."""
        self.steps = self.depth = 0
        self.run(statements(root))

    def run(self, nodes: Iterable[Node]) -> None:
        """Read commands in their order."""
        for node in nodes:
            self.steps += 1
            if self.steps > MAX_STEPS:
                self.notes[f"what follows after {MAX_STEPS} commands"] = None
            elif not self.end:
                self._one(node)

    def _one(self, node: Node) -> None:
        kind, test = node.type, self._test(node)
        if test is not None:
            self.has_failed = not test.holds
            if kind == "command":
                self._expanded(node)  # `: ${NAME:=value}` sets a variable
        elif kind in COMMANDS:
            self._command(node)
        elif kind == "redirected_statement":
            self._redirected(node)
        elif kind == "list":
            self._pair(node)
        elif kind == "if_statement":
            self._conditional(node)
        elif kind == "case_statement":
            self._case(node)
        elif kind in LOOPS:
            for variable in map(text_of, node.children_by_field_name("variable")):
                self.set(variable, [f"${variable}"])
            self.run(node.children_by_field_name("body"))
        elif kind == "function_definition":
            self.functions |= {text_of(name): node for name in node.children_by_field_name("name")}
        elif kind in CONTAINERS:
            self.run(statements(node))

    def _line(self, node: Node) -> int:
        return self.line or node.start_point.row + 1

    def _redirected(self, node: Node) -> None:
        """Read a command with its redirections; a here-document that bears on precision is named."""
        inner, *redirects = node.named_children
        redirects += [one for redirect in redirects for one in redirect.children_by_field_name("redirect")]
        words = [[one for one in redirect.named_children if one.type in WORDS] for redirect in redirects]
        if inner.type == "command" and self._test(inner) is None:
            self._command(inner, [word for group in words for word in group[1:]])
        else:
            self._one(inner)
        self._written(name_of(inner), redirects)
        bodies = [text_of(one) for part in redirects for one in part.named_children if one.type == "heredoc_body"]
        is_shown = name_of(inner) == "cat" and len(redirects) == 1
        if not is_shown and any(map(starts.PRECISION_WORDS.search, bodies)):
            self.notes[f"heredoc on line {self._line(node)}"] = None

    def _written(self, command: str, redirects: Sequence[Node]) -> None:
        """Note the file that `cat` writes from a here-document; one that another command writes is unknown."""
        targets = [one for redirect in redirects if redirect.type == "file_redirect" for one in redirect.named_children]
        heredocs = [one for one in redirects if one.type == "heredoc_redirect"]
        for name in map(self.text, (one for one in targets if one.type in WORDS)):
            self.files.pop(name, None)
            if command == "cat" and len(targets) == len(heredocs) == 1:
                start, body = (
                    next((one for one in heredocs[0].children if one.type == kind), None) for kind in HEREDOC
                )
                text = text_of(body)
                is_plain = text_of(start)[:1] in ("'", '"', "\\")
                self.files[name] = text if is_plain else self._text(text, is_quoted=True)

    # -- branches ------------------------------------------------------------------------------------------------------

    def _pair(self, node: Node) -> None:
        left, right, is_and = node.children[0], node.children[-1], node.children[1].type == "&&"
        test = self._test(left)
        if test is not None:
            arm = self._arm(test, [left], [right] if is_and else [])
            self.has_failed = not self._branch([arm], [] if is_and else [right])
        else:
            self._one(left)
            if self.has_failed != is_and and not self.end:
                self._one(right)

    def _conditional(self, node: Node) -> None:
        arms = list[Arm]()
        for clause in (node, *(child for child in node.children if child.type == "elif_clause")):
            then = next((at for at, child in enumerate(clause.children) if child.type == "then"), 0)
            condition = [child for child in clause.children[:then] if child.is_named and child.type != "comment"]
            body = [child for child in clause.children[then:] if child.is_named and child.type not in NO_BODY]
            self.run(child for child in condition if self._test(child) is None)
            test = (self._test(condition[-1]) if condition else None) or Test(holds=False)
            arms.append(self._arm(test, condition or [clause], body, "if" if clause is node else "elif"))
        self._branch(arms, [child for child in node.children if child.type == "else_clause"])
        self.has_failed = False

    def _arm(self, test: Test, condition: Sequence[Node], body: Sequence[Node], word: str = "if") -> Arm:
        text = " ".join(" ".join(map(text_of, condition)).split())
        return Arm(test, text, self._line(condition[0]), body, word)

    def _case(self, node: Node) -> None:
        subject, arms = self.text(node.children_by_field_name("value")[0]), list[Arm]()
        name = f"${variable_of(subject)}" if variable_of(subject) else Word.of(subject)
        for item in (child for child in node.named_children if child.type == "case_item"):
            patterns = item.children_by_field_name("value")
            head = " ".join(text_of(item).removeprefix("(").partition(")")[0].split())
            test = matched(subject, [self.text(one) for one in patterns if one.type in WORDS])
            body = item.named_children[len(patterns) :]
            arms.append(Arm(test, f"case {name} in {head})", self._line(item), body))
        self._branch(arms, [])
        self.has_failed = False

    def _branch(self, arms: Sequence[Arm], otherwise: Sequence[Node]) -> bool:
        """Read the commands of the first condition that holds; return whether there is one.

        A branch that ends the script and starts nothing is left for the next one that the run may take.
        """
        free = [arm for arm in arms if arm.test.is_free]
        arm = next((arm for arm in arms if self._holds(arm)), None)
        ended = list[Arm | None]()
        for taken in (arm, *(other for other in (None, *free) if other is not arm)):
            arm, count, self.end = taken, len(self.launches), ""
            self.run(otherwise if arm is None else arm.body)
            if not self.end or len(self.launches) > count:
                break
            ended.append(arm)
        if arms and None not in ended:
            label = arms[0].label(holds=False) if arm is None else arm.label(holds=True)
            for one in (one for one in free if one not in ended):
                self.questions.setdefault(one.test.equal or one.text, (one, label))
        return arm is not None

    def _holds(self, arm: Arm) -> bool:
        return self.answers.get(arm.text, arm.test.holds) if arm.test.is_free else arm.test.holds

    def _test(self, node: Node) -> Test | None:
        """Return the answer of a condition, None for a command that is none."""
        kind, first = node.type, node.children[0].type if node.children else ""
        if kind == "negated_command":
            inner = self._test(node.named_children[-1])
            return None if inner is None else inner.negated
        if kind == "list":
            sides = (self._test(node.children[0]), self._test(node.children[-1]))
            return None if None in sides else Test(holds=False)
        if kind == "test_command" and first in ("[", "[["):
            return answer([self.text(one) if one.type in WORDS else text_of(one) for one in tested(node)])
        if kind == "command" and name_of(node) == "test":
            return answer([self.text(one) for one in node.children[1:] if one.type in WORDS])
        if kind == "command" and name_of(node) in ANSWERS:
            return Test(holds=ANSWERS[name_of(node)], is_free=False)
        return Test(holds=False) if kind == "test_command" or first == "((" else None

    # -- commands ------------------------------------------------------------------------------------------------------

    def _command(self, node: Node, behind: Sequence[Node] = ()) -> None:
        """Read a command; `behind` are words of it that stand behind a redirection."""
        self.executed.add(node.id)
        words, before = self._expanded(node) + self.words(behind), self.values.copy()
        names = self._assigned(node)
        self.has_failed = False
        if words and words[0] in DECLARERS:
            for name, sign, value in (word.partition("=") for word in words[1:]):
                names[name] = None
                if sign and NAME.fullmatch(name):
                    self.set(name, [value])
            self.exported |= names if words[0] == "export" else {}
        elif words:
            self._simple(words, self._line(node), names)
            for name in names:  # `NAME=value command` sets it for the command only
                self.values.pop(name)
            self.values |= {name: before[name] for name in names if name in before}

    def _expanded(self, node: Node) -> list[str]:
        """Return the words of a command."""
        words: list[str] = []
        children = () if node.type == "variable_assignment" else node.children
        for child in children:
            if child.type == "command_name" or child.type in WORDS:
                words += self.words(child.children[:1] if child.type == "command_name" else [child])
            elif child.type in ("=", "==") or (not child.is_named and child.type != "$"):
                words.append(text_of(child))
        return words

    def _assigned(self, node: Node) -> dict[str, None]:
        """Set the variables of a command, and return their names."""
        names = dict[str, None]()
        children = [node] if node.type == "variable_assignment" else node.children
        for one in (child for child in children if child.type == "variable_assignment"):
            name, _, index = text_of(one.children[0]).partition("[")
            given = one.child_by_field_name("value")
            is_array = given is not None and given.type == "array"
            words = [self.text(given)] if given is not None else [""]
            if given is not None and is_array:
                words = self.words(child for child in given.named_children if child.type in WORDS)
            append = len(one.children) > 1 and one.children[1].type == "+="
            self.set(name, words, append=append or bool(index), is_array=is_array or bool(index))
            names[name] = None
        return names

    def _simple(self, words: list[str], line: int, prefix: Iterable[str]) -> None:
        first = words[0]
        if first in ("exit", "return"):
            self.end = first
        elif first.startswith("-") and len(first) > 1:
            self.stray += map(Word.of, words)
            if self.launches:
                self.notes[f"line {line}, {starts.STRAY}"] = None
        elif first in ("source", "."):
            name = Word.of("".join(words[1:2]))
            self._read(neighbour(self.path, name), line, f"source {name}")
        elif first == "eval":
            self._string(" ".join(words[1:]), line)
        elif first in self.functions:
            self._call(self.functions[first], words[1:])
        else:
            self._start(words, line, prefix)

    def _call(self, function: Node, words: list[str]) -> None:
        """Read the commands of a function with its arguments."""
        outer = {name: self.values.pop(name) for name in [*self.values] if not NAME.fullmatch(name)}
        self.values |= {"@": words, "*": words, "#": [str(len(words))]}
        self.values |= {str(place): [word] for place, word in enumerate(words, 1)}
        self._within(function.children_by_field_name("body"), self.line)
        self.values = {name: held for name, held in self.values.items() if NAME.fullmatch(name)} | outer

    def _within(self, nodes: Iterable[Node], line: int) -> None:
        """Read commands of a function, a string or another file."""
        if self.depth >= MAX_DEPTH:
            return
        before, self.line = self.line, line
        self.depth += 1
        self.run(nodes)
        self.depth -= 1
        self.line = before
        self.end = self.end.removeprefix("return")

    def _string(self, text: str, line: int) -> None:
        """Read a string that is a script: what nothing had set when it was written is unknown unless it is exported."""
        names = {name for found in (DEFAULT, UNKNOWN) for groups in found.findall(text) for name in groups}
        hidden = {name: self.values.pop(name) for name in names & self.values.keys() - self.exported.keys()}
        self._read(text, line, f"the string on line {line}")
        self.values = hidden | self.values

    def _read(self, text: str | None, line: int, name: str) -> None:
        """Read a text that is a script; note one that is not there, or is none."""
        try:
            root = None if text is None else parse(text, self.path)
        except PayloadError:
            root = None
        if root is None:
            self.notes[name] = None
            return
        self.scripts.append(root)
        self._within(statements(root), line)

    def _start(self, words: list[str], line: int, prefix: Iterable[str]) -> None:
        """Note what a command starts."""
        count, inner = len(self.launches), starts.nested_script(words)
        if inner is not None:
            self._string(inner, line)
        started = starts.found_launch([Word.of(word) for word in words], line)
        if started is None and words[0] not in READERS:
            for word in words[1:]:
                self.files.pop(word, None)
        if started is None or len(self.launches) > count:
            return
        started = replace(started, files=dict(self.files))
        if is_job(words):
            job = job_environment(words, lambda name: neighbour(self.path, name))
            self.launches.append(replace(started, environment=job.variables, unread_environment=job.unread))
        else:
            self.launches.append(replace(started, environment=self.environment(prefix)))

    def environment(self, prefix: Iterable[str] = ()) -> dict[str, Word]:
        """Return the variables that programs are given."""
        return {name: Word.of(" ".join(self.values[name])) for name in (*self.exported, *prefix) if name in self.values}


def neighbour(path: str, word: Word) -> str | None:
    """Return the text of a file next to the script at a path, None where there is none."""
    unknown = [*UNKNOWN.finditer(word)]
    name = word[unknown[-1].end() :].lstrip("/") if unknown else word
    if not name or name.startswith(("/", "~")):
        return None
    try:
        return Document.load(Path(path).parent / name).text
    except (PayloadError, ValueError):
        return None


def tested(node: Node) -> Iterable[Node]:
    """Return the words and operators of `[ ... ]` or `[[ ... ]]` without the brackets."""
    for child in node.children:
        if child.type not in ("[", "]", "[[", "]]"):
            yield from [child] if child.type in WORDS or not child.child_count else tested(child)
