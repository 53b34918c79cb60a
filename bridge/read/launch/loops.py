"""`LoopInterpreter`: `for`, `while` and `until`.

The body is read once, and notes what it starts. What the loop leaves behind in variables is known
where its words are constants: then the body is read again with each of them. Otherwise each value
that a second turn changes is one that only the run knows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bridge.read.launch.bash.conditions import ConditionResult
from bridge.read.launch.bash.counted_loop import CountedLoop
from bridge.read.launch.branches import BranchInterpreter
from bridge.read.launch.commands import MAX_REPEATED_COMMANDS
from bridge.read.launch.shell_word import UNKNOWN_PATTERN, ShellWord
from bridge.read.launch.syntax_tree import get_node_text, list_statements
from bridge.read.launch.trace import Arm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tree_sitter import Node

    from bridge.read.launch.bash.shell import ShellState
    from bridge.read.launch.launch import Launch

MAX_LOOP_WORDS = 64
"""Of a loop that is read with each of its words."""
LOOP_NODES = frozenset({"for_statement", "while_statement", "c_style_for_statement"})


class LoopInterpreter(BranchInterpreter):
    """The loops of a script."""

    def __init__(
        self, stated: Mapping[str, str], answers: Mapping[str, bool], *, is_lenient: bool
    ) -> None:
        super().__init__(stated, answers, is_lenient=is_lenient)
        self.levels = 0
        """How many loops `break` or `continue` ends."""
        self.loops = 0
        """Loops of the function around the command."""
        self.readers |= dict.fromkeys(LOOP_NODES, self._run_loop)

    def _run_loop(self, node: Node) -> None:
        """Read a loop of any kind."""
        body = node.children_by_field_name("body")
        variables = [*map(get_node_text, node.children_by_field_name("variable"))]
        if variables:
            self._run_for(node, body, variables)
        elif node.type == "while_statement":
            self._run_while(node, body)
        else:
            self._run_c_style_for(node, body)

    def _run_for(self, node: Node, body: Sequence[Node], variables: Sequence[str]) -> None:
        """Read `for NAME in WORDS`."""
        words = self._expand_for_words(node)
        if words == []:
            return
        before = self.state()
        for variable in variables:
            self.set(variable, [f"${variable}"])
        goes_on = self._run_iteration(body)
        if not self._is_changed(before, variables):
            return
        if words is not None:
            self._repeat_with_words(before, body, variables[0], words)
        else:
            self._forget_unstable_values(before, node, body, goes_on=goes_on, has_a_turn=False)

    def _run_while(self, node: Node, body: Sequence[Node]) -> None:
        """Read `while CONDITION` or `until CONDITION`."""
        answer = self._run_loop_condition(node)
        has_a_turn = not answer.is_undecided
        if has_a_turn and not answer.holds:
            return
        self._run_uncounted_loop(node, body, has_a_turn=has_a_turn)

    def _run_c_style_for(self, node: Node, body: Sequence[Node]) -> None:
        """Read `for ((START; CONDITION; STEP))`."""
        counted = CountedLoop.from_node(node)
        if counted is not None and self._run_counted_loop(counted, body):
            return
        header, _, _ = get_node_text(node).partition("do")
        self.forget_computed(header)
        self._run_uncounted_loop(node, body, has_a_turn=False)

    def _run_uncounted_loop(self, node: Node, body: Sequence[Node], *, has_a_turn: bool) -> None:
        """Read the body of a loop whose number of turns is not known."""
        before = self.state()
        goes_on = self._run_iteration(body)
        if self._is_changed(before, ()):
            self._forget_unstable_values(before, node, body, goes_on=goes_on, has_a_turn=has_a_turn)

    def _run_counted_loop(self, loop: CountedLoop, body: Sequence[Node]) -> bool:
        """Read a loop that counts from a constant to another; return whether it is such a loop."""
        before = self.state()
        values = loop.values(self.values)
        if values is None:
            return False
        if not values:
            return True
        self.set(loop.counter, [values[0]])
        if not self._run_iteration(body):
            return True

        def further_turns() -> None:
            for value in values[1:]:
                self.set(loop.counter, [value])
                if not self._run_iteration(body):
                    return
            self.set(loop.counter, [str(int(values[-1]) + 1)])

        after_one_turn = self.state()
        self._run_again(further_turns)
        if self.repeated > MAX_REPEATED_COMMANDS:
            self.restore(after_one_turn)
            self._forget_changed(before)
        return True

    def _expand_for_words(self, node: Node) -> list[str] | None:
        """Return the words of a `for`; None where only the run knows one of them."""
        if any(child.type == "in" for child in node.children):
            words = self.words(node.children_by_field_name("value"))
        elif "@" in self.values:
            words = self.get_elements("@")
        else:
            return None
        if len(words) > MAX_LOOP_WORDS:
            return None
        for text in words:
            word = ShellWord.from_text(text)
            is_pattern = any(sign in text for sign in "*?[{")
            if word.defaults or word.is_unknown or is_pattern:
                return None
        return words

    def _run_loop_condition(self, node: Node) -> ConditionResult:
        """Read the condition of `while` or `until`; return whether the body is read."""
        condition = [child for child in list_statements(node) if child.type != "do_group"]
        self.run_condition(condition)
        answer = None
        if condition:
            answer = self.answer(condition[-1])
        if answer is None or answer.is_undecided:
            return ConditionResult(holds=True)
        if node.children[0].type == "until":
            return answer.negated
        return answer

    def _run_iteration(self, body: Sequence[Node]) -> bool:
        """Read the body of a loop; return whether the loop goes on."""
        self.loops += 1
        self.run(body)
        self.loops -= 1
        if self.end not in ("break", "continue"):
            return not self.end
        goes_on = self.end == "continue" and self.levels <= 1
        self.levels -= 1
        if self.levels <= 0 or not self.loops:
            self.end = ""
        return goes_on

    def _is_changed(self, before: ShellState, loop_variables: Sequence[str]) -> bool:
        """Return whether a turn has changed what is known, other than the variables of the loop."""
        if self.exported != before.exported or self.functions != before.functions:
            return True
        now = self.values.copy()
        for name in loop_variables:
            now.pop(name, None)
            if name in before.values:
                now[name] = before.values[name]
        return now != before.values

    def _repeat_with_words(
        self, before: ShellState, body: Sequence[Node], variable: str, words: Sequence[str]
    ) -> None:
        """Read a loop again with each of its words, for the values that it leaves behind."""
        after_one_turn = self.state()
        end = self.end
        self.restore(replace(before, values=before.values.copy()))
        self.end = ""

        def turns() -> None:
            for word in words:
                self.set(variable, [word])
                if not self._run_iteration(body):
                    return

        self._run_again(turns)
        if self.repeated > MAX_REPEATED_COMMANDS:
            self.restore(after_one_turn)
            self.end = end
            self._forget_changed(before)

    def _forget_unstable_values(
        self,
        before: ShellState,
        node: Node,
        body: Sequence[Node],
        *,
        goes_on: bool,
        has_a_turn: bool,
    ) -> None:
        """Make values that a further turn changes unknown.

        Args:
            before: The state before the loop.
            node: The loop.
            body: Its commands.
            goes_on: Whether a turn may follow the one that was read.
            has_a_turn: Whether the loop has at least one turn; otherwise it is a question.
        """
        first = self.state()
        after = self.state()
        end = self.end
        further_body = body if goes_on else ()
        self._run_again(lambda: self._run_iteration(further_body))
        second = self.state()
        self.end = end
        self.restore(after)
        if self.repeated > MAX_REPEATED_COMMANDS:
            self._forget_changed(before)
        for name in first.values.keys() | second.values.keys():
            value = first.values.get(name)
            is_unknown = value is not None and any(map(UNKNOWN_PATTERN.search, value.values()))
            if value != second.values.get(name) and not is_unknown:
                self.forget(name)
        if has_a_turn:
            return
        header = " ".join(get_node_text(node).partition("\n")[0].partition(";")[0].split())
        arm = Arm(
            answer=ConditionResult(holds=True),
            text=header,
            line=self.line_of(node),
            body=body,
            word="in",
        )
        if not self.holds(arm):
            self.restore(before)
        self.reading.ask(arm, taken=arm.label(holds=True))

    def _forget_changed(self, before: ShellState) -> None:
        for name in [*self.values]:
            if self.values[name] != before.values.get(name):
                self.forget(name)

    def _run_again(self, read: Callable[[], object]) -> None:
        """Read commands again, for their variables alone.

        A launch is added where its precision differs from that of each launch on its line.
        """
        before = self.reading
        was_repeated = self.is_repeated
        self.reading = before.copy()
        self.is_repeated = True
        read()
        launches = self.reading.launches[len(before.launches) :]
        self.reading = before
        self.is_repeated = was_repeated
        for launch in launches:
            same_line = [other for other in before.launches if other.line == launch.line]
            is_known = any(other.precision_words == launch.precision_words for other in same_line)
            is_open = any(map(_has_undecided_argument, (*same_line, launch)))
            if not is_open and not is_known:
                before.launches.append(launch)


def _has_undecided_argument(launch: Launch) -> bool:
    """Return whether only the run decides an argument of a launch."""
    return any(word.is_unknown for word in launch.arguments)
