"""`Branches`: `if`, `case`, `a && b` and `a || b`, of which one branch is read.

A condition that the file does not decide is a question: `alternatives` asks for the same reading
with another answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.read.launch.bash.conditions import Answer, matched
from bridge.read.launch.notes import Note
from bridge.read.launch.reading import Arm
from bridge.read.launch.script import WORDS, text_of
from bridge.read.launch.walk import Walk
from bridge.read.launch.word import Word, variable_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tree_sitter import Node

NO_BODY = ("comment", "elif_clause", "else_clause")
"""Kinds of nodes inside an `if` that are not commands of its first branch."""


class Branches(Walk):
    """The branches of a script."""

    def __init__(
        self, stated: Mapping[str, str], answers: Mapping[str, bool], *, is_lenient: bool
    ) -> None:
        super().__init__(stated)
        self.answers = answers
        """Condition as it is written -> its answer, instead of the one with nothing set."""
        self.is_lenient = is_lenient
        """Whether a branch that ends the script before it starts anything is passed by."""
        self.readers |= {
            "list": self._pair,
            "if_statement": self._conditional,
            "case_statement": self._case,
        }

    def _pair(self, node: Node) -> None:
        """Read `left && right` or `left || right`."""
        left = node.children[0]
        right = node.children[-1]
        is_and = node.children[1].type == "&&"
        answer = self.answer(left)
        if answer is not None and is_and:
            arm = self._arm(answer, [left], [right])
            self.has_failed = not self._branch([arm], [])
        elif answer is not None:
            arm = self._arm(answer, [left], [])
            self.has_failed = not self._branch([arm], [right])
        else:
            self.read(left)
            if self.has_failed != is_and and not self.end:
                self.read(right)

    def _conditional(self, node: Node) -> None:
        """Read an `if` with its `elif` and `else`."""
        arms = [self._clause(node, "if")]
        for child in node.children:
            if child.type == "elif_clause":
                arms.append(self._clause(child, "elif"))
        otherwise = [child for child in node.children if child.type == "else_clause"]
        self._branch(arms, otherwise)
        self.has_failed = False

    def _clause(self, clause: Node, word: str) -> Arm:
        """Read the condition of an `if` or an `elif`, and return it with its answer."""
        then = 0
        for place, child in enumerate(clause.children):
            if child.type == "then":
                then = place
                break
        condition: list[Node] = []
        for child in clause.children[:then]:
            if child.is_named and child.type != "comment":
                condition.append(child)
        body: list[Node] = []
        for child in clause.children[then:]:
            if child.is_named and child.type not in NO_BODY:
                body.append(child)
        self.read_condition(condition)
        answer = None
        if condition:
            answer = self.answer(condition[-1])
        if answer is None:
            answer = Answer(holds=False)
        return self._arm(answer, condition or [clause], body, word)

    def _arm(
        self, answer: Answer, condition: Sequence[Node], body: Sequence[Node], word: str = "if"
    ) -> Arm:
        """Return a condition with the commands that it decides about."""
        text = " ".join(" ".join(map(text_of, condition)).split())
        line = self.line_of(condition[0])
        return Arm(answer=answer, text=text, line=line, body=body, word=word)

    def _case(self, node: Node) -> None:
        """Read a `case`."""
        subject = self.text(node.children_by_field_name("value")[0])
        items = [child for child in node.named_children if child.type == "case_item"]
        for item in items:
            if item.children[-1].type in (";&", ";;&"):
                line = self.line_of(node)
                noun = f"the case on line {line}, which goes on to its next pattern"
                self.reading.note(Note(noun))
        self._branch([self._item(item, subject) for item in items], [])
        self.has_failed = False

    def _item(self, item: Node, subject: str) -> Arm:
        """Return `PATTERN) COMMANDS ;;` of a `case` about a text."""
        variable = variable_of(subject)
        name = f"${variable}" if variable else Word.of(subject)
        values = item.children_by_field_name("value")
        head = " ".join(text_of(item).removeprefix("(").partition(")")[0].split())
        patterns = [self.text(value) for value in values if value.type in WORDS]
        return Arm(
            answer=matched(subject, patterns),
            text=f"case {name} in {head})",
            line=self.line_of(item),
            body=item.named_children[len(values) :],
        )

    def _branch(self, arms: Sequence[Arm], otherwise: Sequence[Node]) -> bool:
        """Read the commands of the first condition that holds; return whether a condition holds.

        A branch that ends the script and starts nothing is left for the next branch that the run
        may take. A lenient reading takes it for a check that the run passes, also where the file
        decides its condition.
        """
        free = [arm for arm in arms if arm.answer.is_free]
        ended: list[Arm | None] = []
        taken: Arm | None = None
        before = self.state()
        for branch in self._candidates(arms, free):
            if ended:
                self.restore(before)
                before = self.state()
            taken = branch
            count = len(self.reading.launches)
            self.end = ""
            self.run(otherwise if taken is None else taken.body)
            if self.end not in ("exit", "return") or len(self.reading.launches) > count:
                break
            ended.append(taken)
        if arms and None not in ended:
            label = arms[0].label(holds=False)
            if taken is not None:
                label = taken.label(holds=True)
            for arm in free:
                if arm not in ended:
                    self.reading.ask(arm, taken=label)
        return taken is not None

    def _candidates(self, arms: Sequence[Arm], free: Sequence[Arm]) -> list[Arm | None]:
        """Return the branch that is taken, and then those that the run may take.

        None stands for `else`.
        """
        first = None
        for arm in arms:
            if self.holds(arm):
                first = arm
                break
        if not (free or self.is_lenient):  # the file decides
            return [first]
        others = [branch for branch in (None, *free) if branch is not first]
        return [first, *others]

    def holds(self, arm: Arm) -> bool:
        """Return whether a condition holds in this reading."""
        if arm.answer.is_free:
            return self.answers.get(arm.text, arm.answer.holds)
        return arm.answer.holds
