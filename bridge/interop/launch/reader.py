"""`Reader`: one pass over the tree of a script, on all its paths at once.

The path that bash takes with nothing set is the first. At a condition that the file does not decide, a copy of it goes
the other way, until the two are the same again. A piece that only a run decides is a part of a word, and never guessed.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from bridge.errors import PayloadError
from bridge.interop.launch.conditions import Test, answer, matched
from bridge.interop.launch.launches import (
    COMMAND_WORDS,
    PRECISION_WORDS,
    QUIET,
    SHELLS,
    found_launch,
    nested_script,
)
from bridge.interop.launch.script import WORDS, Script, parse, statements
from bridge.interop.launch.word import Part, Word, joined
from bridge.interop.launch.world import World
from bridge.interop.reading.document import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tree_sitter import Node

MAX_STEPS = 12_000
"""Commands of all paths together."""
MAX_PATHS = 48
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
SIMPLE = re.compile(r"[\w.,:/=+-]+")
"""A text that means the same inside a string that is a script."""


class Arm(NamedTuple):
    """A condition, and the commands that it decides about."""

    test: Callable[[World], Test]
    key: str
    """The condition as it is written."""
    labels: tuple[str, str]
    """The branch where it does not hold, and the one where it does."""
    body: Sequence[Node]
    otherwise: Sequence[Node] = ()
    """Commands that are read where it does not hold, and no other condition follows."""
    before: Sequence[Node] = ()
    """Commands in the condition."""


class Reader:
    """Reads a script; `worlds` are the paths through it, the first one first."""

    def __init__(self, script: Script, path: str, start: World) -> None:
        self.script, self.path = script, path
        self.scripts = {"": script}
        """The script, and the strings and files in it that are scripts, by their texts."""
        self.line = 0
        """The line of the script that a string or a sourced file stands on; 0: outside of one."""
        self.steps = self.depth = 0
        self.forks: dict[object, World] = {}
        """What is otherwise on a path -> that path."""
        self.taken: dict[str, str] = {}
        """Condition that parts them -> the branch that the first path takes."""
        self.joined: list[World] = []
        """Paths that came together with the first one."""
        self.parts: list[Part] = []
        self.notes: dict[str, None] = {}
        """What was not read on any path."""
        worlds = self.run(statements(script.root), [start]) + self.joined
        self.worlds = sorted(worlds, key=lambda world: (bool(world.because), world.number))

    def run(self, nodes: Iterable[Node], worlds: list[World]) -> list[World]:
        """Read commands in their order on several paths."""
        for node in nodes:
            self.steps += len(worlds)
            if self.steps > MAX_STEPS:
                for world in worlds:
                    world.notes[f"what follows after {MAX_STEPS} commands"] = None
                break
            if all(world.ended for world in worlds):
                break
            worlds = list(chain.from_iterable([one] if one.ended else self.one(node, one) for one in worlds))
            self.join(worlds)
        return worlds

    def join(self, worlds: list[World]) -> None:
        """Take the paths out that are like the first one again."""
        first = worlds[0]
        for world in worlds[1:]:
            if first.is_first and world.is_like(first):
                world.rest = (len(first.launches), len(first.executed))
                self.forks = {point: one for point, one in self.forks.items() if one is not world}
                self.taken = {key: label for key, label in self.taken.items() if label != world.taken}
                self.joined.append(world)
                worlds.remove(world)

    def one(self, node: Node, world: World) -> list[World]:
        """Read one command; the status of each path says whether it succeeded as far as the file tells."""
        kind, worlds = node.type, [world]
        if kind in COMMANDS:
            return self.command(node, world)
        if kind == "redirected_statement":
            return self.one(node.named_children[0], world)
        if kind == "list":
            return self.pair(node, world)
        if is_test(node):
            return self.branch([self.arm([node], node, "if", [], [])], world)
        if kind == "if_statement":
            worlds = self.conditional(node, world)
        elif kind == "case_statement":
            worlds = self.case(node, world)
        elif kind in LOOPS:
            for variable in map(self.script.text, node.children_by_field_name("variable")):
                world.set(variable, [Word([Part(f"${variable}", variable)])])
            worlds = self.run(node.children_by_field_name("body"), worlds)
        elif kind == "function_definition":
            name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
            if name is not None and body is not None:
                world.functions[self.script.text(name)] = (self.script, body)
        elif kind in CONTAINERS:
            worlds = self.run(statements(node), worlds)
        for one in worlds:
            one.status = None
        return worlds

    # -- branches ------------------------------------------------------------------------------------------------------

    def pair(self, node: Node, world: World) -> list[World]:
        """Read `left && right` or `left || right`."""
        left, right, is_and = node.children[0], node.children[-1], node.children[1].type == "&&"
        if is_test(left):
            return self.branch([self.arm([left], node, "if", *(([right], []) if is_and else ([], [right])))], world)
        found: list[World] = []
        for one in self.one(left, world):
            goes_on = not one.ended and (one.status is not False) == is_and
            found += self.one(right, one) if goes_on else [one]
        return found

    def conditional(self, node: Node, world: World) -> list[World]:
        """Read an `if`."""
        clauses = [node, *(child for child in node.children if child.type == "elif_clause")]
        otherwise = [child for child in node.children if child.type == "else_clause"]
        arms = []
        for clause in clauses:
            then = next((at for at, child in enumerate(clause.children) if child.type == "then"), 0)
            condition = [child for child in clause.children[:then] if child.is_named and child.type != "comment"]
            body = [child for child in clause.children[then:] if child.is_named and child.type not in NO_BODY]
            rest = otherwise if clause is clauses[-1] else []
            arms.append(self.arm(condition, clause, "if" if clause is node else "elif", body, rest))
        return self.branch(arms, world)

    def arm(self, condition: list[Node], at: Node, word: str, body: Sequence[Node], otherwise: Sequence[Node]) -> Arm:
        """Return a condition of an `if`."""
        shown = self.script.shown(condition[0], condition[-1]) if condition else ""
        line = f"line {self.line or at.start_point.row + 1}"
        test = partial(self.test, condition[-1] if condition else None)
        before = condition[:-1] if condition and is_test(condition[-1]) else condition
        return Arm(test, shown, (f"{line}, not {shown}", f"{line}, {word} {shown}"), body, otherwise, before)

    def case(self, node: Node, world: World) -> list[World]:
        """Read a `case`."""
        (subject,) = node.children_by_field_name("value")
        text, arms = world.text(self.script, subject), list[Arm]()
        shown = f"${text.variable}" if text.variable else text
        items = [
            (item, item.children_by_field_name("value")) for item in node.named_children if item.type == "case_item"
        ]
        heads = [self.script.shown(patterns[0], patterns[-1]) for _, patterns in items]
        neither = f"{'neither' if len(heads) > 1 else 'not'} {' nor '.join(heads)}"
        label = f"line {self.line or node.start_point.row + 1}, case {shown} is {neither}"
        for (item, patterns), head in zip(items, heads, strict=True):
            like = f"line {self.line or item.start_point.row + 1}, if case {shown} in {head})"
            test = partial(self.match, subject, [one for one in patterns if one.type in WORDS])
            arms.append(Arm(test, f"{shown} in {head}", (label, like), item.named_children[len(patterns) :]))
        return self.branch(arms, world)

    def match(self, subject: Node, patterns: Sequence[Node], world: World) -> Test:
        """Return whether a pattern of a `case` is that of its subject."""
        return matched(world.text(self.script, subject), [world.text(self.script, one) for one in patterns])

    def branch(self, arms: Sequence[Arm], world: World) -> list[World]:
        """Read the commands of the first condition that holds; of each other one on a path of its own."""
        worlds = [world]
        if world.is_first:
            worlds += [other for arm in arms for other in self.fork(arm, arms, world)]
        return [one for before in worlds for one in self.run(self.chosen(arms, before), [before])]

    def chosen(self, arms: Sequence[Arm], world: World) -> Sequence[Node]:
        """Return the commands of the first condition that holds; a branch that only ends the script is not taken."""
        for arm in arms:
            for node in arm.before:
                self.one(node, world)
            test = arm.test(world)
            is_free = test.is_open or bool(test.defaults)
            holds = world.forced.get(arm.key, test.holds) if is_free else test.holds
            ends = self.ends(arm.body if holds else arm.otherwise, world) and (test.is_open or not world.launches)
            world.status = holds != ends
            if world.status:
                return arm.body
        return arms[-1].otherwise if arms else ()

    def fork(self, arm: Arm, arms: Sequence[Arm], world: World) -> list[World]:
        """Return the path on which a condition is answered otherwise, none where the file decides it."""
        test = arm.test(world)
        holds = not test.holds
        point = test.equal or (arm.key, holds)
        is_decided = not test.is_open and not test.defaults
        if is_decided or point in self.forks or self.ends(arm.body, world) or self.ends(arm.otherwise, world):
            return []
        if len(self.forks) >= MAX_PATHS:
            self.notes[f"the branches behind the first {MAX_PATHS}"] = None
            return []
        taken = next(
            (one.labels[1] for one in arms if one.test(world).holds and not self.ends(one.body, world)), arm.labels[0]
        )
        other = world.fork(arm.labels[holds])
        if test.equal is not None:
            other.assume(*test.equal)
        if arm.test(other).holds is not holds:
            other = world.fork(arm.labels[holds] if test.is_open else "")
            other.forced[arm.key] = holds
        self.forks[point] = other
        other.number = self.steps
        other.because = () if test.is_open else test.defaults
        other.taken = self.taken.setdefault(f"${test.equal[0]}" if test.equal else arm.key, taken)
        return [other]

    def test(self, node: Node | None, world: World) -> Test:
        """Return what a condition says."""
        if node is None:
            return Test(holds=True, is_open=False)
        kind, script = node.type, self.script
        if kind == "negated_command":
            inner = self.test(node.named_children[-1], world)
            return inner._replace(holds=not inner.holds)
        if kind == "list":
            left, right = (self.test(node.children[at], world) for at in (0, -1))
            return left.joined(right, is_or=node.children[1].type == "||")
        if kind == "redirected_statement":
            return self.test(node.named_children[0], world)
        if kind == "test_command" and node.children[0].type in ("[", "[["):
            words = [
                world.text(script, one) if one.type in WORDS else Word(script.text(one)) for one in script.test(node)
            ]
            return answer(words, is_double=node.children[0].type == "[[")
        name = script.name(node) if kind == "command" else ""
        if name == "test":
            return answer([world.text(script, one) for one in node.children[1:] if one.type in WORDS], is_double=False)
        return Test(holds=name in TRUE, is_open=name not in (*TRUE, "false"))

    def ends(self, nodes: Iterable[Node], world: World, script: Script | None = None, depth: int = 0) -> bool:
        """Return whether commands end the script and start nothing."""
        script = script or self.script
        for node in nodes:
            inner = node.named_children[0] if node.type == "redirected_statement" else node
            if inner.type in CONTAINERS and self.ends(statements(inner), world, script, depth):
                return True
            if inner.type != "command":
                continue
            first = script.name(inner)
            inside, function = world.functions.get(first, (script, None))
            if first in ("exit", "return"):
                return True
            if function is not None and depth < MAX_DEPTH and self.ends([function], world, inside, depth + 1):
                return True
            if COMMAND_WORDS.search(script.text(inner)) and first not in QUIET:
                return False
        return False

    # -- commands ------------------------------------------------------------------------------------------------------

    def command(self, node: Node, world: World) -> list[World]:
        """Read a simple command, a declaration or assignments."""
        world.executed.append(node.id)
        redirects = self.script.redirects(node)
        words = self.expanded(node, redirects, world)
        before = dict(world.values)
        prefix = self.assigned(node, world)
        world.status = True
        if not words:
            world.exported |= {name: value for name, value in prefix.items() if name in world.exported}
            return [world]
        if words[0] in DECLARERS:
            self.declare(words, prefix, world)
            return [world]
        worlds = self.simple(node, redirects, words, prefix, world)
        for one in worlds:
            for name in prefix:  # `NAME=value command` sets it for the command only
                one.values.pop(name, None)
                one.values |= {name: before[name]} if name in before else {}
        return worlds

    def expanded(self, node: Node, redirects: list[Node], world: World) -> list[Word]:
        """Return the words of a command, those behind a redirection too."""
        words: list[Word] = []
        for child in () if node.type == "variable_assignment" else node.children:
            if child.type == "command_name" or child.type in WORDS:
                words += world.words(self.script, child.children[:1] if child.type == "command_name" else [child])
            elif child.type in ("=", "==") or (not child.is_named and child.type != "$"):
                words.append(Word(self.script.text(child)))
        behind = [one for redirect in redirects for one in targets(redirect)[1:]]
        return words + world.words(self.script, behind)

    def assigned(self, node: Node, world: World) -> dict[str, Word]:
        """Set the variables of a command, and return them."""
        found = {}
        for one in [node] if node.type == "variable_assignment" else node.children:
            if one.type != "variable_assignment":
                continue
            name, _, index = self.script.text(one.children[0]).partition("[")
            given = one.child_by_field_name("value")
            is_array = given is not None and given.type == "array"
            if given is not None and is_array:
                words = world.words(self.script, [child for child in given.named_children if child.type in WORDS])
            else:
                words = [Word() if given is None else world.text(self.script, given)]
            append = len(one.children) > 1 and one.children[1].type == "+="
            world.set(name, words, append=append or bool(index), is_array=is_array or bool(index))
            found[name] = joined(world.values[name])
        return found

    @staticmethod
    def declare(words: list[Word], declared: dict[str, Word], world: World) -> None:
        """Read `export NAME=value` and its kin."""
        for word in words[1:]:
            name, value = word.option()
            if NAME.fullmatch(name) and value is not None:
                world.set(name, [value])
                declared[name] = value
            elif words[0] == "export" and name in world.values:
                declared[name] = joined(world.values[name])
        if words[0] == "export" or any(word.startswith("-") and "x" in word for word in words[1:]):
            world.exported |= declared

    def simple(
        self, node: Node, redirects: list[Node], words: list[Word], prefix: dict[str, Word], world: World
    ) -> list[World]:
        """Read one command by its words."""
        first, line = words[0], node.start_point.row + 1
        world.status = {"true": True, ":": True, "false": False}.get(first)
        if first in ("exit", "return"):
            world.ended = True
        elif first.startswith("-") and len(first) > 1:
            world.stray += words
            if world.launches:
                world.notes[f"line {line}, whose options belong to no command"] = None
        elif first in ("source", "."):
            return self.source(words, line, world)
        elif first == "eval":
            return self.nested(joined(words[1:]), line, world)
        elif first in world.functions:
            return self.call(first, words[1:], world)
        elif world.status is None:
            return self.start(line, redirects, words, prefix, world)
        return [world]

    def call(self, name: str, arguments: list[Word], world: World) -> list[World]:
        """Read the body of a function with its arguments."""
        before = {place: world.values.pop(place) for place in POSITIONAL if place in world.values}
        world.values |= {str(place): [word] for place, word in enumerate(arguments[:9], 1)}
        world.values |= {"@": arguments, "*": arguments, "#": [Word(str(len(arguments)))]}
        script, body = world.functions[name]
        worlds = self.within(script, [body], self.line, world)
        for one in worlds:
            one.values = {key: value for key, value in one.values.items() if key not in POSITIONAL} | before
        return worlds

    def within(self, script: Script, nodes: Iterable[Node], line: int, world: World) -> list[World]:
        """Read commands of a function, a string or another file."""
        if self.depth >= MAX_DEPTH:
            return [world]
        before, self.script, self.line = (self.script, self.line), script, line
        self.depth += 1
        worlds = self.run(nodes, [world])
        self.depth -= 1
        self.script, self.line = before
        for one in worlds:
            one.ended = False
        return worlds

    def source(self, words: list[Word], line: int, world: World) -> list[World]:
        """Read a file that stands in the folder of the script in the same environment; note any other."""
        text = self.neighbour(words[1]) if len(words) > 1 else None
        script = self.parsed(text) if text is not None else None
        if script is None:
            world.notes[f"source {' '.join(words[1:2])}"] = None
            return [world]
        return self.within(script, statements(script.root), self.line or line, world)

    def neighbour(self, word: Word) -> str | None:
        """Return the text of a file next to the script, None where there is none."""
        name = word.parts[-1].text.lstrip("/") if word.is_unknown else word
        path = Path(self.path).parent / name
        if not name or name.startswith(("/", "~")) or "\0" in name or word.parts[-1].variable is not None:
            return None
        try:
            is_read = path.is_file() and path.stat().st_size <= MAX_BYTES
            return path.read_text(encoding="utf-8").replace("\r\n", "\n") if is_read else None
        except (OSError, ValueError):
            return None

    def nested(self, text: Word, line: int, world: World) -> list[World]:
        """Read a string that is a script; a part with a history in it becomes a stand-in."""
        if not COMMAND_WORDS.search(text):
            return [world]
        source = ""
        for part in text.parts:
            if part.variable is None and not (part.defaults and SIMPLE.fullmatch(part.text)):
                source += part.text
            else:
                source += f"__part_{len(self.parts)}__"
                self.parts.append(part)
        script = self.parsed(source)
        if script is None:
            world.notes[f"the string on line {line}"] = None
            return [world]
        return self.within(script, statements(script.root), self.line or line, world)

    def parsed(self, text: str) -> Script | None:
        """Return the tree of a string or file that is a script, None where there is none."""
        try:
            return self.scripts.setdefault(text, self.scripts.get(text) or parse(text, self.path, self.parts))
        except PayloadError:
            return None

    def start(
        self, line: int, redirects: list[Node], words: list[Word], prefix: dict[str, Word], world: World
    ) -> list[World]:
        """Note what a command starts, or the file that it writes."""
        name, text = PurePosixPath(words[0]).name, self.input(redirects, world)
        inner = text if text is not None and name in READ_A_SCRIPT else nested_script(words)
        count = len(world.launches)
        worlds = [world] if inner is None else self.nested(inner, line, world)
        if (inner is not None and inner is text) or len(world.launches) > count:
            return worlds
        started = found_launch(words)
        if started is not None:
            world.start(self.line or line, started, prefix)
        for redirect in redirects:
            self.write(redirect, line, text if words == ["cat"] else None, world)
        if name in EDITORS:
            for word in words[1:]:
                world.write(word, None, line)
        return worlds

    def input(self, redirects: list[Node], world: World) -> Word | None:
        """Return the text that a command reads: its here-document, or its here-string."""
        for redirect in redirects:
            if redirect.type == "herestring_redirect":
                return joined(world.text(self.script, one) for one in targets(redirect)[:1])
            parts = {child.type: child for child in redirect.named_children}
            if "heredoc_body" in parts:
                body, mark = parts["heredoc_body"], self.script.text(parts["heredoc_start"])
                is_literal = mark[:1] in ("'", '"', "\\")
                return self.script.known(self.script.text(body)) if is_literal else world.text(self.script, body)
        return None

    def write(self, redirect: Node, line: int, text: Word | None, world: World) -> None:
        """Note the file that a command writes."""
        sign = next((child.type for child in redirect.children if not child.is_named), "")
        is_error = redirect.children[0].type == "file_descriptor" and self.script.text(redirect.children[0]) != "1"
        if sign not in (">", ">>", ">|", "&>") or is_error:
            return
        for target in targets(redirect)[:1]:
            path = world.text(self.script, target)
            if text is not None and path.endswith(CONFIGURATIONS) and PRECISION_WORDS.search(text):
                world.notes[f"heredoc on line {line}"] = None
            world.write(path, text if sign != ">>" else None, line)


def is_test(node: Node) -> bool:
    """Return whether a command is a test, or several of them joined."""
    if node.type == "list":
        return is_test(node.children[0]) and is_test(node.children[-1])
    if node.type == "negated_command":
        return is_test(node.named_children[-1])
    return node.type == "test_command" or (node.type == "compound_statement" and node.children[0].type == "((")


def targets(redirect: Node) -> list[Node]:
    """Return the words of a redirection: its file first."""
    return [child for child in redirect.named_children if child.type in WORDS]
