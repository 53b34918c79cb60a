"""`Branches`: which branch of each condition is taken, and which others could be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from bridge.interop.launch.conditions import EQUALITY, decided, either, is_test
from bridge.interop.launch.environment import Environment
from bridge.interop.launch.launches import COMMAND_WORDS, QUIET
from bridge.interop.launch.script import WORDS, statements
from bridge.interop.launch.variables import is_unknown, name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tree_sitter import Node

    from bridge.interop.launch.files import Sources
    from bridge.interop.launch.launches import Launch
    from bridge.interop.launch.script import Script

MAX_OPTIONS = 12
CONTAINERS = frozenset({"compound_statement", "subshell", "pipeline", "do_group", "else_clause", "ERROR"})


@dataclass(frozen=True, slots=True)
class Choice:
    """One alternative at a condition that the file does not decide."""

    assumed: tuple[tuple[str, str], ...] = ()
    """Values of variables under which bash comes there."""
    forced: tuple[tuple[str, bool], ...] = ()
    """Conditions that hold, or do not."""
    label: str = ""


FIRST = Choice()
"""The branches that bash takes with nothing set."""


class Branches(Environment, ABC):
    """The branches of a script under a choice; the other arguments are those of `Variables`."""

    def __init__(self, sources: Sources, stated: Mapping[str, str], choice: Choice = FIRST, open_: str = "") -> None:
        super().__init__(sources, stated, dict(choice.assumed), open_)
        self.forced = dict(choice.forced)
        self.launches: list[Launch] = []
        self.points: dict[str, tuple[str, list[Choice]]] = {}
        """Undecided condition -> the branch that was taken, as a report shows it, and the others."""
        self.executed: set[int] = set()

    @abstractmethod
    def run(self, nodes: Iterable[Node]) -> None:
        """Read commands in their order."""

    @abstractmethod
    def one(self, node: Node) -> bool | None:
        """Read one command; return whether it succeeds as far as the file says."""

    def conditional(self, node: Node) -> None:
        """Read the branch of an `if` that is taken."""
        clauses = [node, *(child for child in node.children if child.type == "elif_clause")]
        otherwise = [child for child in node.children if child.type == "else_clause"]
        for place, clause in enumerate(clauses):
            then = next((at for at, child in enumerate(clause.children) if child.type == "then"), 0)
            condition = [child for child in clause.children[:then] if child.is_named and child.type != "comment"]
            body = [child for child in statements(clause) if child.start_byte >= clause.children[then].start_byte]
            body = [child for child in body if child.type not in ("elif_clause", "else_clause")]
            word = "elif" if place else "if"
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

    def answer(self, node: Node, *, sure: bool) -> bool | None:
        """Return whether a command succeeds: None where the file does not say, unless a guess will do."""
        if node.type == "negated_command":
            inner = self.answer(node.named_children[-1], sure=sure)
            return None if inner is None else not inner
        if node.type == "list":
            return either(node.children[1].type == "||", *(self.answer(node.children[at], sure=sure) for at in (0, -1)))
        words = self.test_words(node)
        if words is not None:
            is_double = node.children[0].type == "[["
            if sure:
                return decided(words, double=is_double)
            return decided([self.unknowns.with_nothing_set(word) for word in words], double=is_double) or False
        if node.type == "redirected_statement":
            return self.answer(node.named_children[0], sure=sure)
        if node.type in ("command", "pipeline") and sure:
            return self.one(node)
        return None if sure else node.type == "command" and self.script.name(node) in ("true", ":")

    def joined(self, node: Node) -> bool | None:
        """Read `left && right` or `left || right`; return whether it succeeds."""
        left, right, wanted = node.children[0], node.children[-1], node.children[1].type == "&&"
        if is_test(left):
            if self.holds([left], node, "if", *(([right], []) if wanted else ([], [right]))) == wanted:
                return self.one(right)
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
