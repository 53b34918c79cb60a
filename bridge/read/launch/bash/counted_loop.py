"""`CountedLoop`: the header of a loop that counts up by one, `for ((i = 0; i < N; i++))`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from bridge.read.launch.bash.arithmetic import evaluate_arithmetic
from bridge.read.launch.bash.shell import NAME_PATTERN
from bridge.read.launch.shell_word import ShellWord
from bridge.read.launch.syntax_tree import get_node_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tree_sitter import Node

MAX_ITERATIONS = 256
"""Turns of a loop that is read with each value; a longer loop is read as a loop without a count."""


@dataclass(frozen=True, kw_only=True)
class CountedLoop:
    """A loop whose counter goes up by one."""

    counter: str
    """The variable that counts."""
    start: str
    """The expression of its first value."""
    condition: str
    """The expression that holds before each turn."""

    @classmethod
    def from_node(cls, node: Node) -> Self | None:
        """Return the header of a loop; None for a loop that does not count up by one."""
        if node.type != "c_style_for_statement":
            return None
        initializer = _remove_blanks(node.child_by_field_name("initializer"))
        condition = _remove_blanks(node.child_by_field_name("condition"))
        update = _remove_blanks(node.child_by_field_name("update"))
        counter, sign, start = initializer.partition("=")
        if not sign or update not in (f"{counter}++", f"++{counter}", f"{counter}+=1"):
            return None
        return cls(counter=counter, start=start, condition=condition)

    def compute_values(self, variables: Mapping[str, Mapping[int, str]]) -> list[str] | None:
        """Return the values of the counter, one for each turn.

        Args:
            variables: The elements of each variable that the script has set.

        Returns:
            None if only the run knows a value, or if there are more than `MAX_ITERATIONS` turns.
        """
        variables = {**variables, **self._collect_defaults(variables)}
        first = evaluate_arithmetic(f"$(({self.start}))", variables)
        if first is None:
            return None
        values: list[str] = []
        while len(values) <= MAX_ITERATIONS:
            value = str(int(first) + len(values))
            with_counter = {**variables, self.counter: {0: value}}
            holds = evaluate_arithmetic(f"$(({self.condition}))", with_counter)
            if holds is None:
                return None
            if holds == "0":
                return values
            values.append(value)
        return None

    def _collect_defaults(
        self, variables: Mapping[str, Mapping[int, str]]
    ) -> dict[str, dict[int, str]]:
        """Return the variables of the header with the default in place of `${NAME:-default}`."""
        defaults: dict[str, dict[int, str]] = {}
        for name in NAME_PATTERN.findall(f"{self.start} {self.condition}"):
            text = variables.get(name, {}).get(0)
            if text is not None:
                defaults[name] = {0: str(ShellWord.from_text(text))}
        return defaults


def _remove_blanks(node: Node | None) -> str:
    """Return a node as it is written, without blanks; empty for an absent node."""
    return "".join(get_node_text(node).split())
