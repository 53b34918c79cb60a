"""`LoopInterpreter`: `for`, `while` and `until`.

The body is followed once, with the variable of the loop open, to find its launches. It is then
followed again, only to know the variables after the loop:

- a loop that counts is followed once for each number;
- any other loop is followed a second time. A variable that the second turn changes becomes open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.read.launch.bash.conditions import ConditionResult
from bridge.read.launch.bash.counted_loop import CountedLoop
from bridge.read.launch.branches import BranchInterpreter
from bridge.read.launch.commands import MAX_REPEATED_COMMANDS, End
from bridge.read.launch.shell_word import OPEN_PIECE_PATTERN, ShellWord
from bridge.read.launch.syntax_tree import get_node_text, list_statements
from bridge.read.launch.trace import Arm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tree_sitter import Node

    from bridge.read.launch.bash.shell import ShellState
    from bridge.read.launch.launch import Launch

LOOP_NODES = frozenset({"for_statement", "while_statement", "c_style_for_statement"})


class LoopInterpreter(BranchInterpreter):
    """The loops of a script."""

    def __init__(
        self, stated: Mapping[str, str], forced_results: Mapping[str, bool], *, is_lenient: bool
    ) -> None:
        super().__init__(stated, forced_results, is_lenient=is_lenient)
        self.levels = 0
        """Loops that a `break N` or `continue N` still has to leave."""
        self.loop_depth = 0
        """Loops around the command, within its function."""
        self.handlers |= dict.fromkeys(LOOP_NODES, self._run_loop)

    def _run_loop(self, node: Node) -> None:
        """Follow a loop of any kind."""
        body = node.children_by_field_name("body")
        variables = [*map(get_node_text, node.children_by_field_name("variable"))]
        if variables:
            self._run_for(node, body, variables)
        elif node.type == "while_statement":
            self._run_while(node, body)
        else:
            self._run_c_style_for(node, body)

    def _run_for(self, node: Node, body: Sequence[Node], variables: Sequence[str]) -> None:
        """Follow `for NAME in WORDS`."""
        words = self._expand_for_words(node)
        if words == []:
            return
        before = self.copy_state()
        for variable in variables:
            self.set_text(variable, f"${variable}")
        goes_on = self._run_iteration(body)
        if not self._is_changed(before, variables):
            return
        self._forget_unstable_values(before, body, goes_on=goes_on)
        if words is None:
            self._note_optional_loop(before, node, body)

    def _run_while(self, node: Node, body: Sequence[Node]) -> None:
        """Follow `while CONDITION` or `until CONDITION`."""
        result = self._run_loop_condition(node)
        is_certain = not result.is_open
        if is_certain and not result.holds:
            return
        self._run_uncounted_loop(node, body, is_optional=not is_certain)

    def _run_c_style_for(self, node: Node, body: Sequence[Node]) -> None:
        """Follow `for ((START; CONDITION; STEP))`."""
        counted = CountedLoop.from_node(node)
        values = None
        if counted is not None:
            values = counted.compute_values(self.values)
        if counted is not None and values is not None:
            self._run_counted_loop(counted.counter, values, body)
            return
        header, _, _ = get_node_text(node).partition("do")
        self.forget_computed(header)
        self._run_uncounted_loop(node, body, is_optional=True)

    def _run_uncounted_loop(self, node: Node, body: Sequence[Node], *, is_optional: bool) -> None:
        """Follow a loop whose number of turns is not known.

        Args:
            node: The loop.
            body: Its commands.
            is_optional: Whether the loop may have no turn at all.
        """
        before = self.copy_state()
        goes_on = self._run_iteration(body)
        if not self._is_changed(before, ()):
            return
        self._forget_unstable_values(before, body, goes_on=goes_on)
        if is_optional:
            self._note_optional_loop(before, node, body)

    def _run_counted_loop(self, counter: str, values: Sequence[str], body: Sequence[Node]) -> None:
        """Follow a loop once for each value of its counter."""
        if not values:
            return
        before = self.copy_state()
        self.set_text(counter, values[0])
        if not self._run_iteration(body):
            return

        def run_further_turns() -> None:
            for value in values[1:]:
                self.set_text(counter, value)
                if not self._run_iteration(body):
                    return
            self.set_text(counter, str(int(values[-1]) + 1))

        after_one_turn = self.copy_state()
        self._run_again(run_further_turns)
        if self.repeated_count > MAX_REPEATED_COMMANDS:
            self.restore(after_one_turn)
            self._forget_changed(before)

    def _expand_for_words(self, node: Node) -> list[str] | None:
        """Return the words of a `for`; None if only the run knows a word."""
        if any(child.type == "in" for child in node.children):
            words = self.expand_node_words(node.children_by_field_name("value"))
        else:  # `for NAME; do` is over the positional parameters
            return None
        for text in words:
            word = ShellWord.from_text(text)
            is_pattern = any(sign in text for sign in "*?[{")
            if word.defaults or word.is_open or is_pattern:
                return None
        return words

    def _run_loop_condition(self, node: Node) -> ConditionResult:
        """Follow the condition of `while` or `until`; return whether the loop has a first turn."""
        condition = [child for child in list_statements(node) if child.type != "do_group"]
        self.run_condition(condition)
        result = self.evaluate(condition[-1]) if condition else None
        if result is None or result.is_open:
            return ConditionResult(holds=True)
        if node.children[0].type == "until":
            return result.negated
        return result

    def _run_iteration(self, body: Sequence[Node]) -> bool:
        """Follow the body of a loop once; return whether another turn may follow."""
        self.loop_depth += 1
        self.run_nodes(body)
        self.loop_depth -= 1
        if self.end not in (End.BREAK, End.CONTINUE):
            return self.end is None
        goes_on = self.end is End.CONTINUE and self.levels <= 1
        self.levels -= 1
        if self.levels <= 0 or not self.loop_depth:
            self.end = None
        return goes_on

    def _is_changed(self, before: ShellState, loop_variables: Sequence[str]) -> bool:
        """Return whether a turn has changed the state, except for the variables of the loop."""
        if self.exported != before.exported or self.functions != before.functions:
            return True
        now = self.values.copy()
        for name in loop_variables:
            now.pop(name, None)
            if name in before.values:
                now[name] = before.values[name]
        return now != before.values

    def _forget_unstable_values(
        self, before: ShellState, body: Sequence[Node], *, goes_on: bool
    ) -> None:
        """Follow a second turn, and make the variables open that it changes.

        Args:
            before: The state before the loop.
            body: Its commands.
            goes_on: Whether a second turn may follow the first one, which was followed already.
        """
        first = self.copy_state()
        end = self.end
        if goes_on:
            self._run_again(lambda: self._run_iteration(body))
        second = self.copy_state()
        self.end = end
        self.restore(first)
        if self.repeated_count > MAX_REPEATED_COMMANDS:
            self._forget_changed(before)
        for name in first.values.keys() | second.values.keys():
            value = first.values.get(name)
            is_open = value is not None and any(map(OPEN_PIECE_PATTERN.search, value.values()))
            if value != second.values.get(name) and not is_open:
                self.forget(name)

    def _note_optional_loop(self, before: ShellState, node: Node, body: Sequence[Node]) -> None:
        """Add a loop that may have no turn to the conditions that the script does not decide.

        Where the other branch of this condition is followed, the state before the loop comes back.
        """
        header = " ".join(get_node_text(node).partition("\n")[0].partition(";")[0].split())
        arm = Arm(
            result=ConditionResult(holds=True),
            text=header,
            line=self.get_line(node),
            body=body,
            word="in",
        )
        if not self.holds(arm):
            self.restore(before)
        self.trace.add_open_condition(arm, taken=arm.format_label(holds=True))

    def _forget_changed(self, before: ShellState) -> None:
        """Make the variables open that differ from an earlier state."""
        for name in [*self.values]:
            if self.values[name] != before.values.get(name):
                self.forget(name)

    def _run_again(self, run_turns: Callable[[], object]) -> None:
        """Follow turns of a loop again for their variables, without adding their launches twice.

        A launch is added only if its precision differs from that of each launch on its line, and if
        the script decides all arguments of these launches.
        """
        trace = self.trace
        was_repeated = self.is_repeated
        self.trace = trace.copy()
        self.is_repeated = True
        run_turns()
        repeated_launches = self.trace.launches[len(trace.launches) :]
        self.trace = trace
        self.is_repeated = was_repeated
        for launch in repeated_launches:
            same_line = [other for other in trace.launches if other.line == launch.line]
            is_known = any(other.precision_words == launch.precision_words for other in same_line)
            is_open = any(map(_has_open_argument, (*same_line, launch)))
            if not is_open and not is_known:
                trace.launches.append(launch)


def _has_open_argument(launch: Launch) -> bool:
    """Return whether only the run decides an argument of a launch."""
    return any(word.is_open for word in launch.arguments)
