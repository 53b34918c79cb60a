"""`Reader`: one pass over the tree of a script, as bash would go with nothing set but what is stated.

A condition that the file does not decide is a question: `alternatives` asks for the same pass with another answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from bridge.errors import PayloadError
from bridge.interop.launch import launches as starts
from bridge.interop.launch.conditions import Test, answer, matched
from bridge.interop.launch.script import WORDS, name_of, parse, redirects, shown, statements, targets, text_of
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
NEXT_TO_TEXT = re.compile(r"(?<=[^\s\"'])\$(\d)|\$(\d)(?=[^\s\"'])")
"""A positional parameter next to a text, whose dollar sign the grammar takes for a text of its own in some places."""
CONFIGURATIONS = (".json", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".conf")
DECLARERS = frozenset({"export", "declare", "local", "readonly", "typeset"})
COMMANDS = frozenset({"command", "variable_assignment", "variable_assignments", "declaration_command", "unset_command"})
CONTAINERS = frozenset({"compound_statement", "subshell", "pipeline", "do_group", "else_clause", "ERROR"})
LOOPS = frozenset({"for_statement", "while_statement", "c_style_for_statement"})
WRITING = frozenset({">", ">>", ">|", "&>"})
EDITORS = frozenset({"sed", "cp", "mv"})
NO_BODY = ("comment", "elif_clause", "else_clause")
ANSWERS = {"true": True, ":": True, "false": False}
READ_A_SCRIPT = starts.SHELLS | {"sbatch", "srun", "ssh", "qsub", "bsub"}


class Arm(NamedTuple):
    """A condition with its answer, and the commands that it decides about."""

    test: Test
    key: str
    """The condition as it is written."""
    labels: tuple[str, str]
    """The branch where it does not hold, and the one where it does."""
    body: Sequence[Node]


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
        self.files: dict[str, starts.WrittenFile] = {}
        self.launches: list[starts.Launch] = []
        self.notes: dict[str, None] = {}
        """What was not read."""
        self.executed: set[int] = set()
        """Nodes of the commands that were read."""
        self.stray: list[Word] = []
        """Options that stand where a command should."""
        self.has_failed = self.has_ended = False
        """The last command was `false`, or a condition that did not hold; and the script, or a function, has ended."""
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
            elif not self.has_ended:
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
            self._one(node.named_children[0])
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
            name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
            if name is not None and body is not None:
                self.functions[text_of(name)] = body
        elif kind in CONTAINERS:
            self.run(statements(node))

    # -- branches ------------------------------------------------------------------------------------------------------

    def _pair(self, node: Node) -> None:
        left, right, is_and = node.children[0], node.children[-1], node.children[1].type == "&&"
        test = self._test(left)
        if test is not None:
            arm = self._arm(test, [left], node, "if", [right] if is_and else [])
            self.has_failed = not self._branch([arm], [] if is_and else [right])
        else:
            self._one(left)
            if self.has_failed != is_and and not self.has_ended:
                self._one(right)

    def _conditional(self, node: Node) -> None:
        arms = list[Arm]()
        for clause in (node, *(child for child in node.children if child.type == "elif_clause")):
            then = next((at for at, child in enumerate(clause.children) if child.type == "then"), 0)
            condition = [child for child in clause.children[:then] if child.is_named and child.type != "comment"]
            body = [child for child in clause.children[then:] if child.is_named and child.type not in NO_BODY]
            self.run(child for child in condition if self._test(child) is None)
            test = (self._test(condition[-1]) if condition else None) or Test(holds=False)
            arms.append(self._arm(test, condition, clause, "if" if clause is node else "elif", body))
        self._branch(arms, [child for child in node.children if child.type == "else_clause"])
        self.has_failed = False

    def _arm(self, test: Test, condition: list[Node], at: Node, word: str, body: Sequence[Node]) -> Arm:
        text, line = shown(condition), f"line {self.line or at.start_point.row + 1}"
        return Arm(test, text, (f"{line}, not {text}", f"{line}, {word} {text}"), body)

    def _case(self, node: Node) -> None:
        subject, arms = self.text(node.children_by_field_name("value")[0]), list[Arm]()
        name = f"${variable_of(subject)}" if variable_of(subject) else Word.of(subject)
        items = [(one, one.children_by_field_name("value")) for one in node.named_children if one.type == "case_item"]
        heads = [" ".join(text_of(item).removeprefix("(").partition(")")[0].split()) for item, _ in items]
        neither = f"{'neither' if len(heads) > 1 else 'not'} {' nor '.join(heads)}"
        label = f"line {self.line or node.start_point.row + 1}, case {name} is {neither}"
        for (item, patterns), head in zip(items, heads, strict=True):
            like = f"line {self.line or item.start_point.row + 1}, if case {name} in {head})"
            test = matched(subject, [self.text(one) for one in patterns if one.type in WORDS])
            arms.append(Arm(test, f"{name} in {head}", (label, like), item.named_children[len(patterns) :]))
        self._branch(arms, [])
        self.has_failed = False

    def _branch(self, arms: Sequence[Arm], otherwise: Sequence[Node]) -> bool:
        """Read the commands of the first condition that holds; return whether there is one.

        A branch that only ends the script is not taken.
        """
        taken = None
        for arm in arms:
            test = arm.test
            holds = self.answers.get(arm.key, test.holds) if test.is_free else test.holds
            rest = otherwise if arm is arms[-1] else ()
            if holds != (self._ends(arm.body if holds else rest) and (test.is_open or not self.launches)):
                taken = arm
                break
        if arms and not self._ends(otherwise):
            label = arms[0].labels[0] if taken is None else taken.labels[1]
            for arm in arms:
                if arm.test.is_free and not self._ends(arm.body):
                    self.questions.setdefault(arm.test.equal or (arm.key, not arm.test.holds), (arm, label))
        self.run(otherwise if taken is None else taken.body)
        return taken is not None

    def _test(self, node: Node) -> Test | None:
        """Return what a condition says, None for a command that is none."""
        kind, first = node.type, node.children[0].type if node.children else ""
        if kind == "negated_command":
            inner = self._test(node.named_children[-1])
            return None if inner is None else inner.negated
        if kind == "list":
            right = self._test(node.children[-1])
            left = None if right is None else self._test(node.children[0])
            return left.joined(right, is_or=node.children[1].type == "||") if left and right else None
        if kind == "test_command" and first in ("[", "[["):
            words = [self.text(one) if one.type in WORDS else text_of(one) for one in tested(node)]
            return answer(words)
        if kind == "command" and name_of(node) == "test":
            return answer([self.text(one) for one in node.children[1:] if one.type in WORDS])
        if kind == "command" and name_of(node) in ANSWERS:
            return Test(holds=ANSWERS[name_of(node)], is_open=False)
        return Test(holds=False) if kind == "test_command" or first == "((" else None

    def _ends(self, nodes: Iterable[Node], depth: int = 0) -> bool:
        """Return whether commands end the script and start nothing."""
        for node in nodes:
            inner = node.named_children[0] if node.type == "redirected_statement" else node
            if inner.type in CONTAINERS and self._ends(statements(inner), depth):
                return True
            if inner.type != "command":
                continue
            first = name_of(inner)
            body = self.functions.get(first)
            if first in ("exit", "return") or (body and depth < MAX_DEPTH and self._ends([body], depth + 1)):
                return True
            if starts.COMMAND_WORDS.search(text_of(inner)) and first not in starts.QUIET:
                return False
        return False

    # -- commands ------------------------------------------------------------------------------------------------------

    def _command(self, node: Node) -> None:
        self.executed.add(node.id)
        words, before = self._expanded(node), self.values.copy()
        names = self._assigned(node)
        self.has_failed = False
        if words and words[0] in DECLARERS:
            for name, sign, value in (word.partition("=") for word in words[1:]):
                names[name] = None
                if sign and NAME.fullmatch(name):
                    self.set(name, [value])
            self.exported |= names if words[0] == "export" else {}
        elif words:
            self._simple(node, words, names)
            for name in names:  # `NAME=value command` sets it for the command only
                self.values.pop(name)
                if name in before:
                    self.values[name] = before[name]

    def _expanded(self, node: Node) -> list[str]:
        """Return the words of a command, those behind a redirection too."""
        words: list[str] = []
        for child in () if node.type == "variable_assignment" else node.children:
            if child.type == "command_name" or child.type in WORDS:
                words += self.words(child.children[:1] if child.type == "command_name" else [child])
            elif child.type in ("=", "==") or (not child.is_named and child.type != "$"):
                words.append(text_of(child))
        return words + self.words(one for redirect in redirects(node) for one in targets(redirect)[1:])

    def _assigned(self, node: Node) -> dict[str, None]:
        """Set the variables of a command, and return their names."""
        names = dict[str, None]()
        for one in [node] if node.type == "variable_assignment" else node.children:
            if one.type != "variable_assignment":
                continue
            name, _, index = text_of(one.children[0]).partition("[")
            given = one.child_by_field_name("value")
            is_array = given is not None and given.type == "array"
            if given is not None and is_array:
                words = self.words(child for child in given.named_children if child.type in WORDS)
            else:
                words = ["" if given is None else self.text(given)]
            append = len(one.children) > 1 and one.children[1].type == "+="
            self.set(name, words, append=append or bool(index), is_array=is_array or bool(index))
            names[name] = None
        return names

    def _simple(self, node: Node, words: list[str], prefix: Iterable[str]) -> None:
        first, line = Word.of(words[0]), node.start_point.row + 1
        if first in ("exit", "return"):
            self.has_ended = True
        elif first.startswith("-") and len(first) > 1:
            self.stray += map(Word.of, words)
            if self.launches:
                self.notes[f"line {line}, whose options belong to no command"] = None
        elif first in ("source", "."):
            name = Word.of("".join(words[1:2]))
            self._read(neighbour(self.path, name), line, f"source {name}")
        elif first == "eval":
            self._string(" ".join(words[1:]), line)
        elif first in self.functions:
            before, self.arguments = self.arguments, words[1:]
            self._within([self.functions[first]], self.line)
            self.arguments = before
        else:
            self._start(node, words, prefix)

    def _within(self, nodes: Iterable[Node], line: int) -> None:
        """Read commands of a function, a string or another file."""
        if self.depth >= MAX_DEPTH:
            return
        before, self.line = self.line, line
        self.depth += 1
        self.run(nodes)
        self.depth -= 1
        self.line, self.has_ended = before, False

    def _string(self, text: str, line: int) -> None:
        """Read a string that is a script: what nothing had set when it was written is unknown unless it is exported."""
        if not starts.COMMAND_WORDS.search(text):
            return
        names = {name for found in (DEFAULT, UNKNOWN) for groups in found.findall(text) for name in groups}
        hidden = {name: self.values.pop(name) for name in names & self.values.keys() - self.exported.keys()}
        self._read(NEXT_TO_TEXT.sub(r"${\1\2}", text), line, f"the string on line {line}")
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
        self._within(statements(root), self.line or line)

    def _start(self, node: Node, words: list[str], prefix: Iterable[str]) -> None:
        """Note what a command starts, or the file that it writes."""
        line, name, text = node.start_point.row + 1, PurePosixPath(words[0]).name, self._input_of(node)
        is_fed = text is not None and name in READ_A_SCRIPT
        inner = text if is_fed else starts.nested_script(words)
        if inner is not None:
            count = len(self.launches)
            self._string(inner, line)
            if is_fed or len(self.launches) > count:
                return
        started = starts.found_launch([Word.of(word) for word in words], self.line or line)
        if started is not None:
            place = sum(one.line == started.line for one in self.launches)
            environment = self.environment(prefix)
            self.launches.append(replace(started, environment=environment, files=self.files.copy(), place=place))
        for redirect in redirects(node):
            self._write(redirect, line, text if words == ["cat"] else None)
        changed = self.files.keys() & {*words} if name in EDITORS else ()
        self.files |= {file: starts.WrittenFile(line=line) for file in changed}

    def environment(self, prefix: Iterable[str] = ()) -> dict[str, Word]:
        """Return the variables that programs are given."""
        return {name: Word.of(" ".join(self.values[name])) for name in (*self.exported, *prefix) if name in self.values}

    def _input_of(self, node: Node) -> str | None:
        """Return the here-document that a command reads."""
        for redirect in redirects(node):
            parts = {child.type: child for child in redirect.named_children}
            if "heredoc_body" in parts:
                body, is_quoted = parts["heredoc_body"], text_of(parts["heredoc_start"]).startswith(("'", '"', "\\"))
                return text_of(body) if is_quoted else self.text(body)
        return None

    def _write(self, redirect: Node, line: int, text: str | None) -> None:
        """Note the file that a redirection writes, without a text one that it changes."""
        signs = {child.type for child in redirect.children}
        for path in map(self.text, targets(redirect)[:1] if signs & WRITING else ()):
            if text is not None and path.endswith(CONFIGURATIONS) and starts.PRECISION_WORDS.search(text):
                self.notes[f"heredoc on line {line}"] = None
            key = str(PurePosixPath(Word.of(path)))
            if text is not None or key in self.files:
                self.files[key] = starts.WrittenFile(line=line, text=None if ">>" in signs else text)


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
