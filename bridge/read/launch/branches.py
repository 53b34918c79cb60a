"""`BranchInterpreter`: `if`, `case`, `a && b` and `a || b`. One branch of each is followed.

A condition that the script does not decide is noted in the trace. `script_launches` then follows
the script again with the other result of this condition.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bridge.read.launch.bash.conditions import ConditionResult, match_case_patterns
from bridge.read.launch.commands import CommandInterpreter, End
from bridge.read.launch.notes import Note
from bridge.read.launch.shell_word import UNKNOWN_OUTPUT, ShellWord, get_variable_name
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
        self, stated: Mapping[str, str], forced_results: Mapping[str, bool], *, is_lenient: bool
    ) -> None:
        super().__init__(stated)
        self.forced_results = forced_results
        """Condition as it is written -> whether it holds here, instead of with nothing set."""
        self.is_lenient = is_lenient
        """Whether a branch that ends the script before any launch is skipped, even if the script
        decides its condition. Such a branch is a check that a real run passes."""
        self.handlers |= {
            "list": self._run_pair,
            "if_statement": self._run_if,
            "case_statement": self._run_case,
        }

    def _run_pair(self, node: Node) -> None:
        """Follow `left && right` or `left || right`."""
        left = node.children[0]
        right = node.children[-1]
        is_and = node.children[1].type == "&&"
        result = self.evaluate(left)
        if result is not None and is_and:
            arm = self._make_arm(result, [left], [right])
            self.has_failed = not self._run_taken_branch([arm], [])
        elif result is not None:
            arm = self._make_arm(result, [left], [])
            self.has_failed = not self._run_taken_branch([arm], [right])
        else:
            # The left side is a command: it fails only if it is known to, such as `false`.
            self.run_node(left)
            if self.has_failed != is_and and self.end is None:
                self.run_node(right)

    def _run_if(self, node: Node) -> None:
        """Follow an `if` with its `elif` and `else`."""
        arms = [self._run_if_condition(node, "if")]
        for child in node.children:
            if child.type == "elif_clause":
                arms.append(self._run_if_condition(child, "elif"))
        otherwise = [child for child in node.children if child.type == "else_clause"]
        self._run_taken_branch(arms, otherwise)
        self.has_failed = False

    def _run_if_condition(self, clause: Node, word: str) -> Arm:
        """Follow the condition of an `if` or `elif`, and return it with its result and its body."""
        then_index = _find_then(clause)
        condition: list[Node] = []
        for child in clause.children[:then_index]:
            if child.is_named and child.type != "comment":
                condition.append(child)
        body: list[Node] = []
        for child in clause.children[then_index:]:
            if child.is_named and child.type not in NON_BODY_NODES:
                body.append(child)
        self.run_condition(condition)
        result = self.evaluate(condition[-1]) if condition else None
        if result is None:
            result = ConditionResult(holds=False)
        return self._make_arm(result, condition or [clause], body, word)

    def _make_arm(
        self,
        result: ConditionResult,
        condition: Sequence[Node],
        body: Sequence[Node],
        word: str = "if",
    ) -> Arm:
        """Return a condition with its result and the commands that it decides about."""
        text = " ".join(" ".join(map(get_node_text, condition)).split())
        line = self.get_line(condition[0])
        return Arm(result=result, text=text, line=line, body=body, word=word)

    def _run_case(self, node: Node) -> None:
        """Follow a `case`."""
        subject = self.expand_node_text(node.children_by_field_name("value")[0])
        items = [child for child in node.named_children if child.type == "case_item"]
        for item in items:
            if item.children[-1].type in (";&", ";;&"):
                line = self.get_line(node)
                noun = f"the case on line {line}, which goes on to its next pattern"
                self.trace.note(Note(noun))
        arms = [self._make_case_arm(item, subject) for item in items]
        self._run_taken_branch(_take_first_for_output(arms, subject), [])
        self.has_failed = False

    def _make_case_arm(self, item: Node, subject: str) -> Arm:
        """Return `PATTERN) COMMANDS ;;` of a `case` as an arm.

        Args:
            subject: The text that the patterns are compared with.
        """
        shown_subject: str = ShellWord.from_text(subject)
        variable = get_variable_name(subject)
        if variable:
            shown_subject = f"${variable}"
        pattern_nodes = item.children_by_field_name("value")
        before_commands = get_node_text(item).removeprefix("(").partition(")")[0]
        shown_patterns = " ".join(before_commands.split())
        patterns = [
            self.expand_node_text(node) for node in pattern_nodes if node.type in WORD_NODES
        ]
        return Arm(
            result=match_case_patterns(subject, patterns),
            text=f"case {shown_subject} in {shown_patterns})",
            line=self.get_line(item),
            body=item.named_children[len(pattern_nodes) :],
        )

    def _run_taken_branch(self, arms: Sequence[Arm], otherwise: Sequence[Node]) -> bool:
        """Follow the commands of one branch; return whether it is one of the arms, and not `else`.

        The first arm whose condition holds is taken. If its branch ends the script without a
        launch, the state is restored, and the next branch that a run may take is followed instead.

        Args:
            arms: The conditions in their order, each with its commands.
            otherwise: The commands of `else`.
        """
        open_arms = [arm for arm in arms if arm.result.is_open]
        ended: list[Arm | None] = []
        taken: Arm | None = None
        before = self.copy_state()
        for branch in self._list_possible_branches(arms, open_arms):
            if ended:
                self.restore(before)
            taken = branch
            launch_count = len(self.trace.launches)
            self.end = None
            if taken is None:
                self.run_nodes(otherwise)
            else:
                self.run_nodes(taken.body)
            is_ended = self.end in (End.EXIT, End.RETURN)
            if not is_ended or len(self.trace.launches) > launch_count:
                break
            ended.append(taken)
        # If `else` ends the script, one of the conditions must hold in a run that starts something.
        if arms and None not in ended:
            label = arms[0].format_label(holds=False)
            if taken is not None:
                label = taken.format_label(holds=True)
            for arm in open_arms:
                if arm not in ended:
                    self.trace.add_open_condition(arm, taken=label)
        return taken is not None

    def _list_possible_branches(
        self, arms: Sequence[Arm], open_arms: Sequence[Arm]
    ) -> list[Arm | None]:
        """Return the branch that is taken, and then the others that a run may take.

        None is the branch `else`. A run does not take it behind an arm that always holds, such as
        `*)` of a `case`.
        """
        first = None
        for arm in arms:
            if self.holds(arm):
                first = arm
                break
        if not (open_arms or self.is_lenient):
            return [first]
        others: list[Arm | None] = [arm for arm in open_arms if arm is not first]
        is_else_possible = first is None or first.result.is_open or self.is_lenient
        if first is not None and is_else_possible:
            others.insert(0, None)
        return [first, *others]

    def holds(self, arm: Arm) -> bool:
        """Return whether a condition holds while the script is followed this time."""
        if arm.result.is_open:
            return self.forced_results.get(arm.text, arm.result.holds)
        return arm.result.holds


def _take_first_for_output(arms: list[Arm], subject: str) -> list[Arm]:
    """Return the arms of a `case`; if its subject is the output of a command, the first holds.

    The output is not known, and a script has an arm for each output that it expects. Without any
    arm the variables that all arms set would have no values.
    """
    is_output = ShellWord.from_text(subject).text_when_unset == UNKNOWN_OUTPUT
    if not arms or not is_output or any(arm.result.holds for arm in arms):
        return arms
    return [replace(arms[0], result=ConditionResult(holds=True)), *arms[1:]]


def _find_then(clause: Node) -> int:
    """Return the index of `then` in an `if` or `elif`; 0 if the grammar has not found it."""
    for index, child in enumerate(clause.children):
        if child.type == "then":
            return index
    return 0
