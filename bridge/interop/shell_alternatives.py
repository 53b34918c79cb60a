"""Alternatives that a way through a script leaves: what they would have come to, and which defaults decided so."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

from bridge.interop.shell_tree import AndOr, Arithmetic, Group, Node, Pipe, Simple, Test

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bridge.interop.shell_commands import Commands
    from bridge.interop.shell_ways import Way

__all__ = ["BUILT_IN_TESTS", "MAX_STEPS", "Alternatives", "is_test"]

MAX_STEPS = 6_000
"""Of one reading of a script."""
MAX_STEPS_ASIDE = 3_000
"""Through alternatives that are only looked at."""
LEAVES = frozenset({"continue", "break"})
"""They end a round of a loop; what was set before stays."""
STOPS_AT_ERRORS = re.compile(r"^\s*set\s+(?:-\w*e|-o\s+errexit)|^#!.*\s-\w*e", re.MULTILINE)


BUILT_IN_TESTS = frozenset({"[", "test", "true", "false", ":"})


def is_test(node: Node) -> bool:
    """Return whether a command does nothing but ask."""
    if isinstance(node, AndOr):
        return is_test(node.left) and is_test(node.right)
    if isinstance(node, Pipe):
        return node.negated and len(node.commands) == 1 and is_test(node.commands[0])
    if isinstance(node, Simple) and node.items and node.items[0].word is not None:
        return (node.items[0].word.literal or "") in BUILT_IN_TESTS
    return isinstance(node, Test | Arithmetic)


class Reader(Protocol):
    """What follows the commands of a script."""

    steps: int
    commands: Commands

    def run(self, nodes: Iterable[Node], ways: list[Way]) -> list[Way]:
        """Follow commands on every way."""
        ...


class Alternatives:
    """Looks at the bodies of branches beside the way that is followed.

    Args:
        reader: Follows commands.
        text: The script.
    """

    def __init__(self, reader: Reader, text: str) -> None:
        self.reader = reader
        self.left = MAX_STEPS_ASIDE
        self.is_strict = STOPS_AT_ERRORS.search(text) is not None

    def weigh(
        self, ways: Sequence[Way], before: Way, others: Iterable[Sequence[Node]], about: Iterable[str], first: int
    ) -> None:
        """Note that defaults decide the precision where the body of another alternative comes to another one.

        Args:
            ways: They went through the alternative that was taken.
            before: The way that came to the branch.
            others: The bodies of the other alternatives.
            about: The defaults that decided the branch.
            first: How many launches there were before it.
        """
        names = set(about)
        shadows = [one for body in others if self.ends(body) != "exit" for one in self.aside(body, before)]
        for way in ways:
            for shadow in shadows:
                way.weigh(shadow, names, first)
            if self.left <= 0:
                way.values.deciding |= names
                way.depend(names, first)

    def compare(self, groups: Sequence[Sequence[Way]], about: Iterable[str], first: int) -> None:
        """Note the same of alternatives that are all followed, and that defaults decided in part."""
        names = set(about)
        ways = [way for group in groups for way in group] if names else []
        for way in ways[1:]:
            way.weigh(ways[0], names, first)
            ways[0].weigh(way, names, first)

    def is_idle(self, way: Way, body: Sequence[Node]) -> bool:
        """Return whether a body ends what it stands in and starts nothing, so that no run goes on from it."""
        how = self.ends(body)
        if not how:
            return False
        found = self.aside(body, way)
        started = any((len(one.launches), len(one.scripts)) != (len(way.launches), len(way.scripts)) for one in found)
        return not started and (how == "exit" or not any(one.changed(way.values.variables) for one in found))

    def ends(self, body: Sequence[Node]) -> str:
        """Return how a body ends what it stands in: "exit", "leave" for a round of a loop or a function, or not."""
        last = body[-1] if body else None
        if isinstance(last, Group):
            return self.ends(last.body)
        if isinstance(last, AndOr):
            return "" if is_test(last.left) else self.ends([last.right])
        words = last.items[:2] if isinstance(last, Simple) else []
        texts = [token.word.literal or "" for token in words if token.word is not None]
        fails = texts[:1] == ["return"] and texts[1:] not in ([], ["0"])
        if texts[:1] == ["exit"]:
            return "exit"
        return "leave" if (fails and self.is_strict) or (texts and texts[0] in LEAVES) else ""

    def aside(self, body: Sequence[Node], way: Way) -> list[Way]:
        """Follow a body on a copy of a way, so that nothing of it stays."""
        if self.left <= 0:
            return []
        commands, steps = self.reader.commands, self.reader.steps
        functions, called = dict(commands.functions), set(commands.called)
        self.reader.steps = MAX_STEPS - self.left
        found = self.reader.run(body, [way.copy()])
        self.left = MAX_STEPS - self.reader.steps
        self.reader.steps, commands.functions, commands.called = steps, functions, called
        return found
