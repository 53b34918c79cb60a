"""`CommandInterpreter`: follows the commands of a script in the order in which bash runs them.

It knows blocks, subshells, pipelines, function definitions and `!`. `BranchInterpreter`,
`LoopInterpreter` and `ScriptInterpreter` add further kinds of nodes to `handlers`.
"""

from __future__ import annotations

from enum import Enum
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
"""Commands of a script that are followed; the commands after them are noted as not read."""
MAX_REPEATED_COMMANDS = 1_500
"""Commands that are followed again to know the variables after a loop."""
CONTAINER_NODES = frozenset({"compound_statement", "do_group", "else_clause", "ERROR"})
"""Kinds of nodes whose commands are followed in their order. A part that the grammar does not
understand (`ERROR`) may still have commands in it."""


class End(Enum):
    """A command that ends the script, the function or the loop around it."""

    EXIT = "exit"
    RETURN = "return"
    BREAK = "break"
    CONTINUE = "continue"


class CommandInterpreter(Builtins):
    """The order of commands: blocks, subshells, pipelines, and the end of each."""

    def __init__(self, stated: Mapping[str, str]) -> None:
        super().__init__(stated)
        self.trace = ScriptTrace()
        self.has_failed = False
        """Whether the last command was `false`, or a condition that did not hold."""
        self.end: End | None = None
        """The command that was reached and ends the commands around it. The commands after it are
        skipped until the script, the function or the loop that it ends."""
        self.line = 0
        """The line on which the script runs a string or sources a file, while that is followed;
        otherwise 0. Its own lines are not those of the script."""
        self.step_count = 0
        """Commands that were followed."""
        self.is_repeated = False
        """Whether the body of a loop is being followed again."""
        self.repeated_count = 0
        """Commands that were followed again."""
        self.handlers: dict[str, Callable[[Node], None]] = {
            "negated_command": self._run_negated,
            "function_definition": self._define_function,
            "subshell": self._run_subshell,
            "pipeline": self._run_pipeline,
            **dict.fromkeys(CONTAINER_NODES, self._run_body),
        }
        """Kind of a node -> the method that follows it. A node of another kind has no effect."""

    def run_nodes(self, nodes: Iterable[Node]) -> None:
        """Follow commands in their order."""
        for node in nodes:
            if self.is_repeated:
                self.repeated_count += 1
            else:
                self.step_count += 1
            if self.step_count > MAX_COMMANDS:
                self.trace.note(Note(f"what follows after {MAX_COMMANDS} commands"))
            elif self.end is None and self.repeated_count <= MAX_REPEATED_COMMANDS:
                sibling = node.next_sibling
                if sibling is not None and sibling.type == "&":
                    self._run_in_subshell(node)  # in the background
                else:
                    self.run_node(node)

    def run_node(self, node: Node) -> None:
        """Follow a command or a condition."""
        result = self.evaluate(node)
        if result is not None:
            self.has_failed = not result.holds
            if node.type == "command":
                self.expand_command(node)  # to expand `: ${NAME:=value}` sets a variable
            else:
                self._run_arithmetic(node)
        elif node.type in self.handlers:
            self.handlers[node.type](node)

    def evaluate(self, node: Node) -> ConditionResult | None:
        """Return the result of a condition; None for a command that is no condition."""
        return evaluate_condition(node, self)

    def expand_command(self, node: Node) -> list[str]:
        """Return the words of a command, expanded; none for an assignment without a command."""
        words: list[str] = []
        if node.type == "variable_assignment":
            return words
        for child in node.children:
            if child.type == "command_name":
                words += self.expand_node_words(child.children[:1])
            elif child.type in WORD_NODES:
                words += self.expand_node_words([child])
            elif child.type in ("=", "==") or (not child.is_named and child.type != "$"):
                words.append(get_node_text(child))
        return words

    def run_condition(self, condition: Iterable[Node]) -> None:
        """Follow the commands of a condition that are no comparison.

        A comparison is evaluated after the commands before it: these may set its variables.
        """
        for node in condition:
            if self.evaluate(node) is None:
                self.run_nodes([node])

    def get_line(self, node: Node) -> int:
        """Return the line of the script that a node is on."""
        return self.line or node.start_point.row + 1

    def _run_body(self, node: Node) -> None:
        """Follow the commands inside a block."""
        self.run_nodes(list_statements(node))

    def _run_negated(self, node: Node) -> None:
        """Follow `! command`."""
        self.run_nodes(node.named_children)
        self.has_failed = not self.has_failed

    def _define_function(self, node: Node) -> None:
        """Remember the definition of a function; its commands are followed when it is called."""
        for name in node.children_by_field_name("name"):
            self.functions[get_node_text(name)] = node

    def _run_subshell(self, node: Node) -> None:
        """Follow `(commands)`."""
        state = self.copy_state()
        self._run_body(node)
        self.leave_subshell(state)

    def _run_pipeline(self, node: Node) -> None:
        """Follow `a | b`, of which each command is a subshell."""
        for child in list_statements(node):
            self._run_in_subshell(child)

    def _run_in_subshell(self, node: Node) -> None:
        """Follow a command whose changes of variables are lost."""
        state = self.copy_state()
        self.run_node(node)
        self.leave_subshell(state)

    def leave_subshell(self, state: ShellState) -> None:
        """Go back to the state before a subshell. Its `exit` does not end the script."""
        self.restore(state)
        self.end = None

    def _run_arithmetic(self, node: Node) -> None:
        """Make the variables open that `((A = 1))` changes."""
        text = get_node_text(node)
        if text.startswith("((") and text.endswith("))"):
            self.forget_computed(text[2:-2])
