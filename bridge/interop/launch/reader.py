"""`Path`: one pass over the tree of a script, on one path through its branches.

The path that bash takes with nothing set is the first. A condition that the file does not decide is noted as a `Fork`:
what has to hold for another path. A piece that only a run decides is a part of a word, and never guessed.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path as File
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from bridge.errors import PayloadError
from bridge.interop.launch.conditions import Test, answer, matched
from bridge.interop.launch.files import WrittenFile
from bridge.interop.launch.launches import (
    COMMAND_WORDS,
    PRECISION_WORDS,
    QUIET,
    SHELLS,
    Launch,
    found_launch,
    nested_script,
)
from bridge.interop.launch.script import WORDS, name_of, parse, redirects, shown, statements, targets, text_of
from bridge.interop.launch.variables import Variables
from bridge.interop.launch.word import Part, Word, joined
from bridge.interop.reading.document import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tree_sitter import Node

MAX_STEPS = 12_000
"""Commands of a path, and of all paths together."""
MAX_DEPTH = 12
"""Of functions, strings and sourced files within each other."""
DECLARERS = frozenset({"export", "declare", "local", "readonly", "typeset"})
NAME = re.compile(r"[A-Za-z_]\w*")
POSITIONAL = (*map(str, range(1, 10)), "@", "*", "#")
COMMANDS = frozenset({"command", "variable_assignment", "variable_assignments", "declaration_command", "unset_command"})
CONTAINERS = frozenset({"compound_statement", "subshell", "pipeline", "do_group", "else_clause", "ERROR"})
LOOPS = frozenset({"for_statement", "while_statement", "c_style_for_statement"})
EDITORS = frozenset({"sed", "cp", "mv"})
CONFIGURATIONS = (".json", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".conf")
NO_BODY = ("comment", "elif_clause", "else_clause")
TRUE = ("true", ":")
READ_A_SCRIPT = SHELLS | {"sbatch", "srun", "ssh", "qsub", "bsub"}


class Arm(NamedTuple):
    """A condition, and the commands that it decides about."""

    test: Test
    key: str
    """The condition as it is written."""
    labels: tuple[str, str]
    """The branch where it does not hold, and the one where it does."""
    body: Sequence[Node]
    otherwise: Sequence[Node] = ()
    """Commands that are read where it does not hold, and no other condition follows."""


class Fork(NamedTuple):
    """Another path, that parts from one at a condition which the file does not decide."""

    stated: Mapping[str, Word]
    """The variable that decides, and its value there."""
    forced: Mapping[str, bool]
    """The condition, and its answer there."""
    label: str
    """The branch that it takes; empty where it is not to be listed."""
    taken: str
    """The branch that the path takes which it parts from."""
    because: tuple[str, ...]
    """The variables whose defaults decide there."""


class Path(Variables):
    """One path through a script: what bash knows at a point of it, and what was started before."""

    def __init__(self, root: Node, path: str, stated: Mapping[str, Word], fork: Fork | None = None) -> None:
        super().__init__({**stated, **(fork.stated if fork else {})})
        self.path, self.forced = path, fork.forced if fork else {}
        self.scripts = {"": root}
        """The script, and the strings and files in it that are scripts, by their texts."""
        self.exported: dict[str, Word] = {}
        self.functions: dict[str, Node] = {}
        self.files: dict[str, WrittenFile] = {}
        self.launches: list[Launch] = []
        self.notes: dict[str, None] = {}
        self.executed: set[int] = set()
        """Nodes of the commands that were read."""
        self.stray: list[Word] = []
        """Options that stand where a command should."""
        self.forks: dict[object, Fork] = {}
        """What is otherwise on a path -> that path."""
        self.taken: dict[str, str] = {}
        """Condition, or variable that decides -> the branch that is taken on this path."""
        self.status: bool | None = None
        """Whether the last command succeeded; None: only the run decides it."""
        self.ended = False
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
            if self.ended or self.steps > MAX_STEPS:
                break
            self.one(node)

    def one(self, node: Node) -> None:
        """Read one command; `status` says whether it succeeded as far as the file tells."""
        kind = node.type
        if kind in COMMANDS:
            return self.command(node)
        if kind == "redirected_statement":
            return self.one(node.named_children[0])
        if is_test(node):
            self.status = self.test(node).holds
            return None
        if kind == "list":
            return self.pair(node)
        if kind == "if_statement":
            self.conditional(node)
        elif kind == "case_statement":
            self.case(node)
        elif kind in LOOPS:
            for variable in map(text_of, node.children_by_field_name("variable")):
                self.set(variable, [Word([Part(f"${variable}", variable)])])
            self.run(node.children_by_field_name("body"))
        elif kind == "function_definition":
            name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
            if name is not None and body is not None:
                self.functions[text_of(name)] = body
        elif kind in CONTAINERS:
            self.run(statements(node))
        self.status = None
        return None

    # -- branches ------------------------------------------------------------------------------------------------------

    def pair(self, node: Node) -> None:
        """Read `left && right` or `left || right`."""
        left, right, is_and = node.children[0], node.children[-1], node.children[1].type == "&&"
        if is_test(left):
            return self.branch([self.arm([left], node, "if", *(([right], []) if is_and else ([], [right])))])
        self.one(left)
        if not self.ended and (self.status is not False) == is_and:
            self.one(right)
        return None

    def conditional(self, node: Node) -> None:
        """Read an `if`."""
        arms = []
        clauses = [node, *(child for child in node.children if child.type == "elif_clause")]
        otherwise = [child for child in node.children if child.type == "else_clause"]
        for clause in clauses:
            then = next((at for at, child in enumerate(clause.children) if child.type == "then"), 0)
            condition = [child for child in clause.children[:then] if child.is_named and child.type != "comment"]
            body = [child for child in clause.children[then:] if child.is_named and child.type not in NO_BODY]
            self.run(child for child in condition if not is_test(child))
            rest = otherwise if clause is clauses[-1] else []
            arms.append(self.arm(condition, clause, "if" if clause is node else "elif", body, rest))
        self.branch(arms)

    def arm(self, condition: list[Node], at: Node, word: str, body: Sequence[Node], otherwise: Sequence[Node]) -> Arm:
        """Return a condition of an `if`."""
        text, line = shown(condition), f"line {self.line or at.start_point.row + 1}"
        test = self.test(condition[-1]) if condition else Test(holds=True, is_open=False)
        return Arm(test, text, (f"{line}, not {text}", f"{line}, {word} {text}"), body, otherwise)

    def case(self, node: Node) -> None:
        """Read a `case`."""
        subject = self.text(node.children_by_field_name("value")[0])
        name, arms = f"${subject.variable}" if subject.variable else subject, list[Arm]()
        items = [
            (item, item.children_by_field_name("value")) for item in node.named_children[1:] if item.type == "case_item"
        ]
        heads = [shown(patterns) for _, patterns in items]
        neither = f"{'neither' if len(heads) > 1 else 'not'} {' nor '.join(heads)}"
        label = f"line {self.line or node.start_point.row + 1}, case {name} is {neither}"
        for (item, patterns), head in zip(items, heads, strict=True):
            test = matched(subject, [self.text(one) for one in patterns if one.type in WORDS])
            like = f"line {self.line or item.start_point.row + 1}, if case {name} in {head})"
            arms.append(Arm(test, f"{name} in {head}", (label, like), item.named_children[len(patterns) :]))
        self.branch(arms)

    def branch(self, arms: Sequence[Arm]) -> None:
        """Read the commands of the first condition that holds, and note the paths through the others."""
        chosen = next((arm for arm in arms if self.holds(arm)), None)
        for arm in arms:
            self.fork(arm, chosen.labels[1] if chosen else arm.labels[0])
        if chosen is not None:
            self.run(chosen.body)
        elif arms:
            self.run(arms[-1].otherwise)
        self.status = chosen is not None

    def holds(self, arm: Arm) -> bool:
        """Return whether a condition holds on this path; a branch that only ends the script is not taken."""
        is_free = arm.test.is_open or bool(arm.test.defaults)
        holds = self.forced.get(arm.key, arm.test.holds) if is_free else arm.test.holds
        return holds != (self.ends(arm.body if holds else arm.otherwise) and (arm.test.is_open or not self.launches))

    def fork(self, arm: Arm, taken: str) -> None:
        """Note the path on which a condition is answered otherwise, none where the file decides it."""
        test, holds = arm.test, not arm.test.holds
        point = test.equal or (arm.key, holds)
        is_decided = not test.is_open and not test.defaults
        if is_decided or point in self.forks or self.ends(arm.body) or self.ends(arm.otherwise):
            return
        self.forks[point] = Fork(
            stated={test.equal[0]: Word(test.equal[1])} if test.equal else {},
            forced={arm.key: holds},
            label=arm.labels[holds] if test.is_open or test.equal else "",
            taken=self.taken.setdefault(f"${test.equal[0]}" if test.equal else arm.key, taken),
            because=() if test.is_open else test.defaults,
        )

    def test(self, node: Node) -> Test:
        """Return what a condition says."""
        kind = node.type
        if kind == "negated_command":
            return self.test(node.named_children[-1]).negated
        if kind == "list":
            left, right = (self.test(node.children[at]) for at in (0, -1))
            return left.joined(right, is_or=node.children[1].type == "||")
        if kind == "redirected_statement":
            return self.test(node.named_children[0])
        if kind == "test_command" and node.children[0].type in ("[", "[["):
            words = [self.text(one) if one.type in WORDS else Word(text_of(one)) for one in tested(node)]
            return answer(words, is_double=node.children[0].type == "[[")
        name = name_of(node) if kind == "command" else ""
        if name == "test":
            return answer([self.text(one) for one in node.children[1:] if one.type in WORDS], is_double=False)
        return Test(holds=name in TRUE, is_open=name not in (*TRUE, "false"))

    def ends(self, nodes: Iterable[Node], depth: int = 0) -> bool:
        """Return whether commands end the script and start nothing."""
        for node in nodes:
            inner = node.named_children[0] if node.type == "redirected_statement" else node
            if inner.type in CONTAINERS and self.ends(statements(inner), depth):
                return True
            if inner.type != "command":
                continue
            first = name_of(inner)
            if first in ("exit", "return"):
                return True
            if first in self.functions and depth < MAX_DEPTH and self.ends([self.functions[first]], depth + 1):
                return True
            if COMMAND_WORDS.search(text_of(inner)) and first not in QUIET:
                return False
        return False

    # -- commands ------------------------------------------------------------------------------------------------------

    def command(self, node: Node) -> None:
        """Read a simple command, a declaration or assignments."""
        self.executed.add(node.id)
        words = self.expanded(node)
        before = dict(self.values)
        prefix = self.assigned(node)
        self.status = True
        if not words:
            self.exported |= {name: value for name, value in prefix.items() if name in self.exported}
        elif words[0] in DECLARERS:
            self.declare(words, prefix)
        else:
            self.simple(node, words, prefix)
            for name in prefix:  # `NAME=value command` sets it for the command only
                self.values.pop(name, None)
                self.values |= {name: before[name]} if name in before else {}

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

    def simple(self, node: Node, words: list[Word], prefix: dict[str, Word]) -> None:
        """Read one command by its words."""
        first, line = words[0], node.start_point.row + 1
        self.status = {"true": True, ":": True, "false": False}.get(first)
        if first in ("exit", "return"):
            self.ended = True
        elif first.startswith("-") and len(first) > 1:
            self.stray += words
            if self.launches:
                self.notes[f"line {line}, whose options belong to no command"] = None
        elif first in ("source", "."):
            self.source(words, line)
        elif first == "eval":
            self.nested(joined(words[1:]), line)
        elif first in self.functions:
            self.call(self.functions[first], words[1:])
        elif self.status is None:
            self.start(node, words, prefix)

    def call(self, body: Node, arguments: list[Word]) -> None:
        """Read the body of a function with its arguments."""
        before = {place: self.values.pop(place) for place in POSITIONAL if place in self.values}
        self.values |= {str(place): [word] for place, word in enumerate(arguments[:9], 1)}
        self.values |= {"@": arguments, "*": arguments, "#": [Word(str(len(arguments)))]}
        self.within([body], self.line)
        self.values = {key: value for key, value in self.values.items() if key not in POSITIONAL} | before

    def within(self, nodes: Iterable[Node], line: int) -> None:
        """Read commands of a function, a string or another file."""
        if self.depth < MAX_DEPTH:
            before, self.line = self.line, line
            self.depth += 1
            self.run(nodes)
            self.depth -= 1
            self.line, self.ended = before, False

    def source(self, words: list[Word], line: int) -> None:
        """Read a file that stands in the folder of the script in the same environment; note any other."""
        text = neighbour(self.path, words[1]) if len(words) > 1 else None
        if text is None or not self.read(text, line):
            self.notes[f"source {' '.join(words[1:2])}"] = None

    def nested(self, text: Word, line: int) -> None:
        """Read a string that is a script."""
        if COMMAND_WORDS.search(text) and not self.read(self.script(text), line):
            self.notes[f"the string on line {line}"] = None

    def read(self, text: str, line: int) -> bool:
        """Read a string or a file that is a script; return whether it is one."""
        try:
            root = self.scripts.get(text) or parse(text, self.path)
        except PayloadError:
            return False
        self.scripts[text] = root
        self.within(statements(root), self.line or line)
        return True

    def start(self, node: Node, words: list[Word], prefix: dict[str, Word]) -> None:
        """Note what a command starts, or the file that it writes."""
        line, name, text = node.start_point.row + 1, PurePosixPath(words[0]).name, self.input(node)
        inner = text if text is not None and name in READ_A_SCRIPT else nested_script(words)
        count = len(self.launches)
        if inner is not None:
            self.nested(inner, line)
        if (inner is not None and inner is text) or len(self.launches) > count:
            return
        started = found_launch(words, self.line or line)
        if started is not None:
            place = sum(one.line == started.line for one in self.launches)
            environment = {**self.exported, **prefix}
            self.launches.append(replace(started, environment=environment, files=self.files.copy(), place=place))
        for redirect in redirects(node):
            self.write(redirect, line, text if words == ["cat"] else None)
        if name in EDITORS:
            for word in words[1:]:
                self.note_file(word, None, line)

    def input(self, node: Node) -> Word | None:
        """Return the text that a command reads: its here-document, or its here-string."""
        for redirect in redirects(node):
            if redirect.type == "herestring_redirect":
                return joined(self.text(one) for one in targets(redirect)[:1])
            parts = {child.type: child for child in redirect.named_children}
            if "heredoc_body" in parts:
                body, mark = parts["heredoc_body"], text_of(parts["heredoc_start"])
                return self.known(text_of(body)) if mark[:1] in ("'", '"', "\\") else self.text(body)
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


def neighbour(path: str, word: Word) -> str | None:
    """Return the text of a file next to the script at a path, None where there is none."""
    name = word.parts[-1].text.lstrip("/") if word.is_unknown else word
    file = File(path).parent / name
    if not name or name.startswith(("/", "~")) or "\0" in name or word.parts[-1].variable is not None:
        return None
    try:
        is_read = file.is_file() and file.stat().st_size <= MAX_BYTES
        return file.read_text(encoding="utf-8").replace("\r\n", "\n") if is_read else None
    except (OSError, ValueError):
        return None


def is_test(node: Node) -> bool:
    """Return whether a command is a test, or several of them joined."""
    if node.type == "list":
        return is_test(node.children[0]) and is_test(node.children[-1])
    if node.type == "negated_command":
        return is_test(node.named_children[-1])
    return node.type == "test_command" or (node.type == "compound_statement" and node.children[0].type == "((")


def tested(node: Node) -> Iterable[Node]:
    """Return the words and operators of `[ ... ]` or `[[ ... ]]` without the brackets."""
    for child in node.children:
        if child.type not in ("[", "]", "[[", "]]"):
            yield from [child] if child.type in WORDS or not child.child_count else tested(child)
