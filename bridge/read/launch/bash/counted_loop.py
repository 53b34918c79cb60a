"""`CountedLoop`: the header of a loop that counts, `for ((i = 0; i < N; i++))`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from bridge.read.launch.bash.arithmetic import evaluate_arithmetic
from bridge.read.launch.shell_word import ShellWord
from bridge.read.launch.syntax_tree import get_node_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tree_sitter import Node

MAX_ITERATIONS = 256
NAME_PATTERN = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class CountedLoop:
    """A loop whose counter goes up by one."""

    counter: str
    start: str
    """The first value, an expression."""
    condition: str

    @classmethod
    def from_node(cls, node: Node) -> Self | None:
        """Return the header of a loop; None for a loop that does not count up by one."""
        if node.type != "c_style_for_statement":
            return None
        start = _remove_blanks(node.child_by_field_name("initializer"))
        condition = _remove_blanks(node.child_by_field_name("condition"))
        step = _remove_blanks(node.child_by_field_name("update"))
        counter, sign, first = start.partition("=")
        if not sign or step not in (f"{counter}++", f"++{counter}", f"{counter}+=1"):
            return None
        return cls(counter=counter, start=first, condition=condition)

    def values(self, known: Mapping[str, Mapping[int, str]]) -> list[str] | None:
        """Return the values of the counter in the turns.

        It is None where only the run knows a value, and where there are too many turns.

        Args:
            known: The elements of each variable that the script has set.
        """
        known = {**known, **self._defaults(known)}
        first = evaluate_arithmetic(f"$(({self.start}))", known)
        if first is None:
            return None
        values: list[str] = []
        while len(values) <= MAX_ITERATIONS:
            value = str(int(first) + len(values))
            holds = evaluate_arithmetic(
                f"$(({self.condition}))", {**known, self.counter: {0: value}}
            )
            if holds is None:
                return None
            if holds == "0":
                return values
            values.append(value)
        return None

    def _defaults(self, known: Mapping[str, Mapping[int, str]]) -> dict[str, dict[int, str]]:
        """Return the variables of the header whose value is a default, with the default itself."""
        defaults: dict[str, dict[int, str]] = {}
        for name in NAME_PATTERN.findall(f"{self.start} {self.condition}"):
            text = known.get(name, {}).get(0)
            if text is not None:
                defaults[name] = {0: str(ShellWord.from_text(text))}
        return defaults


def _remove_blanks(node: Node | None) -> str:
    return "".join(get_node_text(node).split())
