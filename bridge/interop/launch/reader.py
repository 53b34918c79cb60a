"""`Reader`: one pass over the tree of a script, with the states that bash can be in.

The first state is that of bash with nothing set. At a condition that the file does not decide another state parts from
it, which is answered otherwise there and goes on to the end of the script; no third one parts from that. Where the
script asked for the same variable before, that state has its value from the first command on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from bridge.errors import PayloadError
from bridge.interop.launch.conditions import Test, answer, matched
from bridge.interop.launch.launches import COMMAND_WORDS, QUIET, SHELLS, found_launch, nested_script
from bridge.interop.launch.script import WORDS, name_of, parse, redirects, shown, statements, text_of
from bridge.interop.launch.state import Fork, State
from bridge.interop.launch.word import Part, Word, joined
from bridge.interop.reading.document import MAX_BYTES

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_STEPS = 12_000
"""Commands of all states together; the first one alone goes on, for as many more."""
MAX_STATES = 48
MAX_DEPTH = 12
"""Of functions, strings and sourced files within each other."""
DECLARERS = frozenset({"export", "declare", "local", "readonly", "typeset"})
POSITIONAL = (*map(str, range(1, 10)), "@", "*", "#")
COMMANDS = frozenset({"command", "variable_assignment", "variable_assignments", "declaration_command", "unset_command"})
CONTAINERS = frozenset({"compound_statement", "subshell", "pipeline", "do_group", "else_clause", "ERROR"})
LOOPS = frozenset({"for_statement", "while_statement", "c_style_for_statement"})
EDITORS = frozenset({"sed", "cp", "mv"})
NO_BODY = ("comment", "elif_clause", "else_clause")
TRUE = ("true", ":")
READ_A_SCRIPT = SHELLS | {"sbatch", "srun", "ssh", "qsub", "bsub"}


class Arm(NamedTuple):
    """A condition, and the commands that it decides about."""

    test: Callable[[State], Test]
    key: str
    """The condition as it is written."""
    labels: tuple[str, str]
    """The branch where it does not hold, and the one where it does."""
    body: Sequence[Node]


class Reader:
    """Reads a script once."""

    def __init__(self, root: Node, path: str, stated: Mapping[str, Word], fork: Fork | None = None) -> None:
        self.path, self.stated = path, stated
        self.states = [State(stated, fork or Fork())]
        """What the state that reads a command becomes: itself, and those that part from it."""
        self.scripts = {"": root}
        """The script, and the strings and files in it that are scripts, by their texts."""
        self.points: set[object] = set()
        """Conditions with the answers for which a state was made."""
        self.others: list[State] = []
        """States in which a variable that was asked for before has its value from the first command on."""
        self.taken: dict[str, str] = {}
        """Condition, or variable that decides -> the branch that is taken with nothing set."""
        self.is_cut = False
        """Branches were left out."""
        self.line = 0
        """The line of the script that a string or a sourced file stands on; 0: outside of one."""
        self.steps = self.depth = 0
        self.run(statements(root))

    def run(self, nodes: Iterable[Node]) -> None:
        """Read commands in their order."""
        for node in nodes:
            self.each(partial(self.one, node))

    def each(self, read: Callable[[State], None]) -> None:
        """Let each state read by itself."""
        found = list[State]()
        for state in self.states:
            self.steps += 1
            if self.steps > MAX_STEPS and state.fork.place:
                self.is_cut = True
                continue
            if self.steps > 2 * MAX_STEPS:
                state.notes[f"what follows after {MAX_STEPS} commands"] = None
            elif not state.has_ended:
                self.states = [state]
                read(state)
                found += self.states
                continue
            found.append(state)
        self.states = found

    def one(self, node: Node, state: State) -> None:
        """Read one command."""
        kind = node.type
        if kind in COMMANDS:
            self.command(node, state)
        elif kind == "redirected_statement":
            self.one(node.named_children[0], state)
        elif is_test(node):
            state.has_failed = not self.test(node, state).holds
        elif kind == "list":
            self.pair(node, state)
        elif kind == "if_statement":
            self.conditional(node)
        elif kind == "case_statement":
            self.case(node, state)
        elif kind in LOOPS:
            for variable in map(text_of, node.children_by_field_name("variable")):
                state.set(variable, [Word([Part(f"${variable}", variable)])])
            self.run(node.children_by_field_name("body"))
        elif kind == "function_definition":
            name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
            if name is not None and body is not None:
                state.functions[text_of(name)] = body
        elif kind in CONTAINERS:
            self.run(statements(node))

    # -- branches ------------------------------------------------------------------------------------------------------

    def pair(self, node: Node, state: State) -> None:
        """Read `left && right` or `left || right`."""
        left, right, is_and = node.children[0], node.children[-1], node.children[1].type == "&&"
        if is_test(left):
            arm = self.arm([left], node, "if", [right] if is_and else [])
            return self.branch([arm], [] if is_and else [right], state)
        self.one(left, state)
        return self.each(lambda one: None if one.has_failed == is_and else self.one(right, one))

    def conditional(self, node: Node) -> None:
        """Read an `if`."""
        arms = list[Arm]()
        for clause in (node, *(child for child in node.children if child.type == "elif_clause")):
            then = next((at for at, child in enumerate(clause.children) if child.type == "then"), 0)
            condition = [child for child in clause.children[:then] if child.is_named and child.type != "comment"]
            body = [child for child in clause.children[then:] if child.is_named and child.type not in NO_BODY]
            self.run(child for child in condition if not is_test(child))
            arms.append(self.arm(condition, clause, "if" if clause is node else "elif", body))
        otherwise = [child for child in node.children if child.type == "else_clause"]
        self.decide(arms, otherwise)

    def arm(self, condition: list[Node], at: Node, word: str, body: Sequence[Node]) -> Arm:
        """Return a condition of an `if`."""
        text, line = shown(condition), f"line {self.line or at.start_point.row + 1}"
        test = partial(self.test, condition[-1]) if condition else lambda _: Test(holds=True, is_open=False)
        return Arm(test, text, (f"{line}, not {text}", f"{line}, {word} {text}"), body)

    def case(self, node: Node, state: State) -> None:
        """Read a `case`."""
        value = node.children_by_field_name("value")[0]
        subject, arms = state.text(value), list[Arm]()
        name = f"${subject.variable}" if subject.variable else subject
        items = [(one, one.children_by_field_name("value")) for one in node.named_children if one.type == "case_item"]
        heads = [shown(patterns) for _, patterns in items]
        neither = f"{'neither' if len(heads) > 1 else 'not'} {' nor '.join(heads)}"
        label = f"line {self.line or node.start_point.row + 1}, case {name} is {neither}"
        for (item, patterns), head in zip(items, heads, strict=True):
            like = f"line {self.line or item.start_point.row + 1}, if case {name} in {head})"
            test = partial(self.like, value, [one for one in patterns if one.type in WORDS])
            arms.append(Arm(test, f"{name} in {head}", (label, like), item.named_children[len(patterns) :]))
        self.decide(arms, [])

    def decide(self, arms: Sequence[Arm], otherwise: Sequence[Node]) -> None:
        """Read an `if` or a `case`, which succeeds whatever its conditions say."""
        self.each(partial(self.branch, arms, otherwise))
        for state in self.states:
            state.has_failed = False

    def branch(self, arms: Sequence[Arm], otherwise: Sequence[Node], state: State) -> None:
        """Read the commands of the first condition that holds, in this state and in those that part from it here."""

        def enter(state: State) -> None:
            arm = self.chosen(arms, otherwise, state)
            self.run(otherwise if arm is None else arm.body)
            for one in self.states:
                one.has_failed = arm is None

        if arms and not state.fork.place:
            state.asked.update(*(arm.test(state).asks for arm in arms))
            arm = self.chosen(arms, otherwise, state)
            taken = arms[0].labels[0] if arm is None else arm.labels[1]
            if not self.ends(otherwise, state):
                self.states += filter(None, [self.maybe_parted(arm, taken, state) for arm in arms])
        self.each(enter)

    def chosen(self, arms: Sequence[Arm], otherwise: Sequence[Node], state: State) -> Arm | None:
        """Return the first condition that holds; a branch that only ends the script is not taken."""
        for arm in arms:
            test = arm.test(state)
            holds = state.answers.get(arm.key, test.holds) if test.is_free else test.holds
            rest = otherwise if arm is arms[-1] else ()
            if holds != (self.ends(arm.body if holds else rest, state) and (test.is_open or not state.launches)):
                return arm
        return None

    def maybe_parted(self, arm: Arm, taken: str, state: State) -> State | None:
        """Return the state in which a condition is answered otherwise, None where the file decides it."""
        test = arm.test(state)
        holds = not test.holds
        point = test.equal or (arm.key, holds)
        if not test.is_free or point in self.points or self.ends(arm.body, state):
            return None
        self.points.add(point)
        if len(self.points) > MAX_STATES or self.steps > MAX_STEPS:
            self.is_cut = True
            return None
        fork = Fork(
            place=len(self.points),
            label=arm.labels[holds] if test.is_open or test.equal else "",
            taken=self.taken.setdefault(f"${test.equal[0]}" if test.equal else arm.key, taken),
            because=() if test.is_open else test.defaults,
        )
        if test.equal and test.equal[0] in state.asked:
            name, value = test.equal
            again = Reader(self.scripts[""], self.path, {**self.stated, name: Word(value)}, fork)
            self.others += again.states
            self.steps += again.steps
            return None
        side = state.parted(fork)
        side.answers[arm.key] = holds
        if test.equal:
            side.assume(*test.equal)
        return side

    def like(self, value: Node, patterns: Sequence[Node], state: State) -> Test:
        """Return whether the text of a `case` is one of the patterns."""
        return matched(state.text(value), [state.text(one) for one in patterns])

    def test(self, node: Node, state: State) -> Test:
        """Return what a condition says."""
        kind = node.type
        if kind == "negated_command":
            return self.test(node.named_children[-1], state).negated
        if kind == "list":
            left, right = (self.test(node.children[at], state) for at in (0, -1))
            return left.joined(right, is_or=node.children[1].type == "||")
        if kind == "redirected_statement":
            return self.test(node.named_children[0], state)
        if kind == "test_command" and node.children[0].type in ("[", "[["):
            words = [state.text(one) if one.type in WORDS else Word(text_of(one)) for one in tested(node)]
            return answer(words, is_double=node.children[0].type == "[[")
        name = name_of(node) if kind == "command" else ""
        if name == "test":
            return answer([state.text(one) for one in node.children[1:] if one.type in WORDS], is_double=False)
        return Test(holds=name in TRUE, is_open=name not in (*TRUE, "false"))

    def ends(self, nodes: Iterable[Node], state: State, depth: int = 0) -> bool:
        """Return whether commands end the script and start nothing."""
        for node in nodes:
            inner = node.named_children[0] if node.type == "redirected_statement" else node
            if inner.type in CONTAINERS and self.ends(statements(inner), state, depth):
                return True
            if inner.type != "command":
                continue
            first = name_of(inner)
            body = state.functions.get(first)
            if first in ("exit", "return") or (body and depth < MAX_DEPTH and self.ends([body], state, depth + 1)):
                return True
            if COMMAND_WORDS.search(text_of(inner)) and first not in QUIET:
                return False
        return False

    # -- commands ------------------------------------------------------------------------------------------------------

    def command(self, node: Node, state: State) -> None:
        """Read a simple command, a declaration or assignments."""
        state.executed.add(node.id)
        words, before = state.expanded(node), state.values.copy()
        prefix = state.assigned(node)
        state.has_failed = False
        if not words:
            state.exported |= {name: value for name, value in prefix.items() if name in state.exported}
        elif words[0] in DECLARERS:
            state.declare(words, prefix)
        else:
            self.simple(node, words, prefix, state)
            for one in self.states:  # `NAME=value command` sets it for the command only
                one.restore(prefix, before)

    def simple(self, node: Node, words: list[Word], prefix: dict[str, Word], state: State) -> None:
        """Read one command by its words."""
        first, line = words[0], node.start_point.row + 1
        if first in ("exit", "return"):
            state.has_ended = True
        elif first.startswith("-") and len(first) > 1:
            state.stray += words
            if state.launches:
                state.notes[f"line {line}, whose options belong to no command"] = None
        elif first in ("source", "."):
            text = neighbour(self.path, words[1]) if len(words) > 1 else None
            self.read(text, line, f"source {' '.join(words[1:2])}", state)
        elif first == "eval":
            self.string(joined(words[1:]), line, state)
        elif first in state.functions:
            arguments, before = words[1:], state.values.copy()
            state.restore(POSITIONAL, {str(place): [word] for place, word in enumerate(arguments[:9], 1)})
            state.values |= {"@": arguments, "*": arguments, "#": [Word(str(len(arguments)))]}
            self.within([state.functions[first]], self.line)
            for one in self.states:
                one.restore(POSITIONAL, before)
        elif first in (*TRUE, "false"):
            state.has_failed = first == "false"
        else:
            self.start(node, words, prefix, state)

    def within(self, nodes: Iterable[Node], line: int) -> None:
        """Read commands of a function, a string or another file."""
        if self.depth >= MAX_DEPTH:
            return
        before, self.line = self.line, line
        self.depth += 1
        self.run(nodes)
        self.depth -= 1
        self.line = before
        for one in self.states:
            one.has_ended = False

    def string(self, text: Word, line: int, state: State) -> None:
        """Read a string that is a script."""
        if COMMAND_WORDS.search(text):
            self.read(state.script(text), line, f"the string on line {line}", state)

    def read(self, text: str | None, line: int, name: str, state: State) -> None:
        """Read a text that is a script; note one that is not there, or is none."""
        try:
            root = None if text is None else self.scripts.get(text) or parse(text, self.path)
        except PayloadError:
            root = None
        if root is None or text is None:
            state.notes[name] = None
        else:
            self.scripts[text] = root
            self.within(statements(root), self.line or line)

    def start(self, node: Node, words: list[Word], prefix: dict[str, Word], state: State) -> None:
        """Note what a command starts, or the file that it writes."""
        line, name, text = node.start_point.row + 1, PurePosixPath(words[0]).name, state.input_of(node)
        is_fed = text is not None and name in READ_A_SCRIPT
        inner = text if is_fed else nested_script(words)
        if inner is not None:
            count = len(state.launches)
            self.string(inner, line, state)
            if is_fed or any(len(one.launches) > count for one in self.states):
                return
        started = found_launch(words, self.line or line)
        if started is not None:
            place = sum(one.line == started.line for one in state.launches)
            environment = {**state.exported, **prefix}
            state.launches.append(replace(started, environment=environment, files=state.files.copy(), place=place))
        for redirect in redirects(node):
            state.write(redirect, line, text if words == ["cat"] else None)
        for word in words[1:] if name in EDITORS else ():
            state.note_file(word, None, line)


def neighbour(path: str, word: Word) -> str | None:
    """Return the text of a file next to the script at a path, None where there is none."""
    name = word.parts[-1].text.lstrip("/") if word.is_unknown else word
    file = Path(path).parent / name
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
