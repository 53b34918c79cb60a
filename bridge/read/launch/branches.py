"""`BranchInterpreter`: `if`, `case`, `a && b` and `a || b`, of which one branch is read.

A condition that the file does not decide is a question: `alternatives` asks for the same reading
with another answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.read.launch.bash.conditions import ConditionResult, match_case_patterns
from bridge.read.launch.commands import CommandInterpreter
from bridge.read.launch.notes import Note
from bridge.read.launch.shell_word import ShellWord, get_variable_name
from bridge.read.launch.syntax_tree import WORD_NODES, get_node_text
from bridge.read.launch.trace import Arm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tree_sitter import Node

NON_BODY_NODES = ("comment", "elif_clause", "else_clause")
"""Kinds of nodes inside an `if` that are not commands of its first branch."""


class BranchInterpreter(CommandInterpreter):
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
            "list": self._run_pair,
            "if_statement": self._run_if,
            "case_statement": self._run_case,
        }

    def _run_pair(self, node: Node) -> None:
        """Read `left && right` or `left || right`."""
        left = node.children[0]
        right = node.children[-1]
        is_and = node.children[1].type == "&&"
        answer = self.answer(left)
        if answer is not None and is_and:
            arm = self._make_arm(answer, [left], [right])
            self.has_failed = not self._run_taken_branch([arm], [])
        elif answer is not None:
            arm = self._make_arm(answer, [left], [])
            self.has_failed = not self._run_taken_branch([arm], [right])
        else:
            self.read(left)
            if self.has_failed != is_and and not self.end:
                self.read(right)

    def _run_if(self, node: Node) -> None:
        """Read an `if` with its `elif` and `else`."""
        arms = [self._run_if_condition(node, "if")]
        for child in node.children:
            if child.type == "elif_clause":
                arms.append(self._run_if_condition(child, "elif"))
        otherwise = [child for child in node.children if child.type == "else_clause"]
        self._run_taken_branch(arms, otherwise)
        self.has_failed = False

    def _run_if_condition(self, clause: Node, word: str) -> Arm:
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
            if child.is_named and child.type not in NON_BODY_NODES:
                body.append(child)
        self.run_condition(condition)
        answer = None
        if condition:
            answer = self.answer(condition[-1])
        if answer is None:
            answer = ConditionResult(holds=False)
        return self._make_arm(answer, condition or [clause], body, word)

    def _make_arm(
        self,
        answer: ConditionResult,
        condition: Sequence[Node],
        body: Sequence[Node],
        word: str = "if",
    ) -> Arm:
        """Return a condition with the commands that it decides about."""
        text = " ".join(" ".join(map(get_node_text, condition)).split())
        line = self.line_of(condition[0])
        return Arm(answer=answer, text=text, line=line, body=body, word=word)

    def _run_case(self, node: Node) -> None:
        """Read a `case`."""
        subject = self.text(node.children_by_field_name("value")[0])
        items = [child for child in node.named_children if child.type == "case_item"]
        for item in items:
            if item.children[-1].type in (";&", ";;&"):
                line = self.line_of(node)
                noun = f"the case on line {line}, which goes on to its next pattern"
                self.reading.note(Note(noun))
        self._run_taken_branch([self._make_case_arm(item, subject) for item in items], [])
        self.has_failed = False

    def _make_case_arm(self, item: Node, subject: str) -> Arm:
        """Return `PATTERN) COMMANDS ;;` of a `case` about a text."""
        variable = get_variable_name(subject)
        name = f"${variable}" if variable else ShellWord.from_text(subject)
        values = item.children_by_field_name("value")
        head = " ".join(get_node_text(item).removeprefix("(").partition(")")[0].split())
        patterns = [self.text(value) for value in values if value.type in WORD_NODES]
        return Arm(
            answer=match_case_patterns(subject, patterns),
            text=f"case {name} in {head})",
            line=self.line_of(item),
            body=item.named_children[len(values) :],
        )

    def _run_taken_branch(self, arms: Sequence[Arm], otherwise: Sequence[Node]) -> bool:
        """Read the commands of the first condition that holds; return whether a condition holds.

        A branch that ends the script and starts nothing is left for the next branch that the run
        may take. A lenient reading takes it for a check that the run passes, also where the file
        decides its condition.
        """
        free = [arm for arm in arms if arm.answer.is_undecided]
        ended: list[Arm | None] = []
        taken: Arm | None = None
        before = self.state()
        for branch in self._list_possible_branches(arms, free):
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

    def _list_possible_branches(self, arms: Sequence[Arm], free: Sequence[Arm]) -> list[Arm | None]:
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
        if arm.answer.is_undecided:
            return self.answers.get(arm.text, arm.answer.holds)
        return arm.answer.holds
