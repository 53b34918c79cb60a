"""`CommandInterpreter`: the commands of a script in the order in which bash comes to them.

`Branches`, `Loops` and `Reader` add the syntax that they are named after, each a line in `readers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.read.launch.bash.builtins import Builtins
from bridge.read.launch.bash.condition_nodes import evaluate_condition
from bridge.read.launch.notes import Note
from bridge.read.launch.syntax_tree import WORD_NODES, get_node_text, list_statements
from bridge.read.launch.trace import ScriptTrace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tree_sitter import Node

    from bridge.read.launch.bash.conditions import ConditionResult
    from bridge.read.launch.bash.shell import ShellState

MAX_COMMANDS = 12_000
"""Commands that are read of a script."""
MAX_REPEATED_COMMANDS = 1_500
"""Commands that are read again to know what a loop leaves behind."""
CONTAINER_NODES = frozenset({"compound_statement", "do_group", "else_clause", "ERROR"})
"""Kinds of nodes whose commands are read in their order."""


class CommandInterpreter(Builtins):
    """The order of commands: blocks, subshells, pipelines, and the end of each."""

    def __init__(self, stated: Mapping[str, str]) -> None:
        super().__init__(stated)
        self.reading = ScriptTrace()
        self.has_failed = False
        """Whether the last command was `false`, or a condition that did not hold."""
        self.end = ""
        """`exit`, `return`, `break` or `continue` after the end of the script, a function, a loop
        or its turn."""
        self.line = 0
        """The line of the script that a string or a sourced file stands on; 0: outside of one."""
        self.steps = 0
        """Commands that were read."""
        self.is_repeated = False
        """Whether a loop is read again."""
        self.repeated = 0
        """Commands that were read again."""
        self.readers: dict[str, Callable[[Node], None]] = {
            "negated_command": self._run_negated,
            "function_definition": self._define_function,
            "subshell": self._run_subshell,
            "pipeline": self._run_pipeline,
            **dict.fromkeys(CONTAINER_NODES, self._run_body),
        }
        """Kind of a node -> the method that reads it; a node of another kind does nothing."""

    def run(self, nodes: Iterable[Node]) -> None:
        """Read commands in their order."""
        for node in nodes:
            if self.is_repeated:
                self.repeated += 1
            else:
                self.steps += 1
            if self.steps > MAX_COMMANDS:
                self.reading.note(Note(f"what follows after {MAX_COMMANDS} commands"))
            elif not self.end and self.repeated <= MAX_REPEATED_COMMANDS:
                follows = node.next_sibling
                if follows is not None and follows.type == "&":
                    self._run_in_subshell(node)
                else:
                    self.read(node)

    def read(self, node: Node) -> None:
        """Read a command or a condition."""
        answer = self.answer(node)
        if answer is not None:
            self.has_failed = not answer.holds
            if node.type == "command":
                self.expand_command(node)  # `: ${NAME:=value}` sets a variable
            else:
                self._run_arithmetic(node)
        elif node.type in self.readers:
            self.readers[node.type](node)

    def answer(self, node: Node) -> ConditionResult | None:
        """Return the answer of a condition; None for a command that is no condition."""
        return evaluate_condition(node, self)

    def expand_command(self, node: Node) -> list[str]:
        """Return the words of a command; none for an assignment alone."""
        words: list[str] = []
        if node.type == "variable_assignment":
            return words
        for child in node.children:
            if child.type == "command_name":
                words += self.words(child.children[:1])
            elif child.type in WORD_NODES:
                words += self.words([child])
            elif child.type in ("=", "==") or (not child.is_named and child.type != "$"):
                words.append(get_node_text(child))
        return words

    def run_condition(self, condition: Iterable[Node]) -> None:
        """Read those commands of a condition that are no comparison.

        Each is looked at when those before it were read: expanding a comparison may set a variable.
        """
        for node in condition:
            if self.answer(node) is None:
                self.run([node])

    def line_of(self, node: Node) -> int:
        """Return the line of the script that a node stands on."""
        return self.line or node.start_point.row + 1

    def _run_body(self, node: Node) -> None:
        self.run(list_statements(node))

    def _run_negated(self, node: Node) -> None:
        self.run(node.named_children)
        self.has_failed = not self.has_failed

    def _define_function(self, node: Node) -> None:
        for name in node.children_by_field_name("name"):
            self.functions[get_node_text(name)] = node

    def _run_subshell(self, node: Node) -> None:
        state = self.state()
        self._run_body(node)
        self.leave_subshell(state)

    def _run_pipeline(self, node: Node) -> None:
        for child in list_statements(node):
            self._run_in_subshell(child)

    def _run_in_subshell(self, node: Node) -> None:
        """Read a command whose changes of variables are lost."""
        state = self.state()
        self.read(node)
        self.leave_subshell(state)

    def leave_subshell(self, state: ShellState) -> None:
        """Go back to the state before a subshell, whose `exit` ends nothing else."""
        self.restore(state)
        self.end = ""

    def _run_arithmetic(self, node: Node) -> None:
        """Read what `((A = 1))` changes; a comparison changes nothing."""
        text = get_node_text(node)
        if text.startswith("((") and text.endswith("))"):
            self.forget_computed(text[2:-2])
