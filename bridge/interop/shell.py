"""The training runs that a launch script starts, found without running it.

`launches(text)` follows assignments, arrays, branches, loops, functions, `eval` and `bash -c` the way bash would and
notes every command that starts a Python program. Where a branch depends on something the file does not say, each way
through that leads to another precision is followed and the launch says which way it took.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from bridge.interop.shell_commands import Commands
from bridge.interop.shell_condition import arithmetic, decided
from bridge.interop.shell_syntax import parse
from bridge.interop.shell_tree import AndOr, Arithmetic, Case, Define, Group, If, Loop, Node, Pipe, Simple, Test
from bridge.interop.shell_values import Unknowns, Values, is_unknown
from bridge.interop.shell_ways import Way, distinct, held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from bridge.interop.launch import Launch
    from bridge.interop.shell_words import Lexer

__all__ = ["launches"]

MAX_WAYS = 16
MAX_STEPS = 6_000
MAX_ITEMS = 16
BUILT_IN_TESTS = frozenset({"[", "test", "true", "false", ":"})


def launches(text: str, path: str = "<script>", variables: Mapping[str, str] | None = None) -> tuple[Launch, ...]:
    """Return every launch of a script; without any, one made of the arguments that its variables hold.

    Args:
        text: The script.
        path: What it is called in messages.
        variables: What the environment sets, where somebody knows it.

    Raises:
        PayloadError: The script is broken: a quote, a bracket or a block that is never closed.
    """
    nodes, lexer = parse(text, path)
    reader = _Reader(lexer)
    ways = reader.run(nodes, [Way(Values(Unknowns(), dict(variables or {})))])
    found = [launch for way in ways for launch in way.launches]
    for name, body in list(reader.commands.functions.items()):
        if not found and name not in reader.commands.called:
            found += [launch for way in reader.run(body, [way.copy() for way in ways]) for launch in way.launches]
    return distinct(found or [held(way) for way in ways])


class _Reader:
    """Follows the tree; `Commands` follows its leaves."""

    def __init__(self, lexer: Lexer) -> None:
        self.lexer = lexer
        self.steps = 0
        self.commands = Commands(self.run, lexer)

    def run(self, nodes: Iterable[Node], ways: list[Way]) -> list[Way]:
        for node in nodes:
            self.steps += len(ways)
            if self.steps > MAX_STEPS:
                for way in ways:
                    way.note(f"what comes after {MAX_STEPS} steps")
                break
            ways = self.one(node, ways)
        return ways

    def one(self, node: Node, ways: list[Way]) -> list[Way]:
        if isinstance(node, Simple):
            return self.each(ways, lambda way: self.commands.simple(node, way))
        if isinstance(node, If):
            return self.each(ways, lambda way: self.conditional(node, way))
        if isinstance(node, AndOr):
            return self.each(ways, lambda way: [one for one, _ in self.and_or(node, way)])
        if isinstance(node, Case):
            return self.each(ways, lambda way: self.case(node, way))
        if isinstance(node, Loop):
            return self.loop(node, ways)
        if isinstance(node, Pipe):
            return self.each(ways, lambda way: self.pipe(node, way))
        if isinstance(node, Define):
            self.commands.functions[node.name] = node.body
        if isinstance(node, Group):
            return self.run(node.body, ways)
        return ways

    def each(self, ways: list[Way], follow: Callable[[Way], list[Way]]) -> list[Way]:
        """Follow every way on its own, and make one of those that agree on the precision."""
        kept: list[Way] = []
        for way in ways:
            found = follow(way)
            seen: list[object] = []
            kinds = []
            for one in found:
                about = one.precision() if len(found) > 1 else None
                if about is None or about not in seen:
                    seen.append(about)
                    kinds.append(one)
            if len(kinds) == 1 and len(found) > 1:
                kinds[0].decisions = way.decisions
            kept += kinds
        if len(kept) > MAX_WAYS:
            kept = kept[:MAX_WAYS]
            for way in kept:
                way.note(f"more than {MAX_WAYS} ways through the script")
        return kept

    # -- branches ----------------------------------------------------------------------------------------------------

    def conditional(self, node: If, way: Way) -> list[Way]:
        found = []
        for place, branch in enumerate(node.branches):
            answer = self.holds(branch.condition, way)
            if answer is False:
                continue
            taken = way.copy()
            if answer is None:
                taken.decisions += (self.told(branch.start, branch.text, "elif" if place else "if"),)
            found += self.run(branch.body, [taken])
            if answer is True:
                return found
        otherwise = way.copy()
        if found:
            texts = " nor ".join(branch.text for branch in node.branches)
            otherwise.decisions += (self.told(node.start, texts, "not" if len(node.branches) == 1 else "neither"),)
        return found + self.run(node.otherwise or [], [otherwise])

    def and_or(self, node: Node, way: Way) -> list[tuple[Way, bool | None]]:
        """Follow `a && b || c`; return each way and whether what ran last succeeded, None where nobody knows."""
        if isinstance(node, AndOr):
            found: list[tuple[Way, bool | None]] = []
            for one, status in self.and_or(node.left, way):
                if status is not None and status is not (node.operator == "&&"):
                    found.append((one, status))
                    continue
                after = self.and_or(node.right, one)
                found += [(last, True if status is not None and done is None else done) for last, done in after]
            return found
        if not self.is_test(node):
            return [(one, None) for one in self.one(node, [way])]
        answer = self.holds([node], way)
        if answer is not None:
            return [(way, answer)]
        taken = way.copy()
        text = self.lexer.text[node.start : node.end]
        taken.decisions += (self.told(node.start, text, "if"),)
        way.decisions += (self.told(node.start, text, "not"),)
        return [(taken, True), (way, False)]

    def case(self, node: Case, way: Way) -> list[Way]:
        subject = way.values.text(node.subject)
        found, certain = [], False
        for patterns, body, text, start in node.arms:
            texts = [way.values.text(pattern) for pattern in patterns]
            if not is_unknown(subject) and not any(map(is_unknown, texts)):
                if any(fnmatchcase(subject, pattern) for pattern in texts):
                    return self.run(body, [way])
                continue
            certain = certain or "*" in texts
            taken = way.copy()
            shown = way.values.unknowns.shown(subject)
            taken.decisions += (self.told(start, f"case {shown} in {text})", "if"),)
            found += self.run(body, [taken])
        return found if certain else [*found, way]

    def loop(self, node: Loop, ways: list[Way]) -> list[Way]:
        if node.variable is None or node.items is None:
            if node.variable is not None:
                for way in ways:
                    way.values.variables[node.variable] = way.values.unknowns.mark(f"${node.variable}")
            return self.run(node.body, ways)
        kept = []
        for way in ways:
            items = [text for word in node.items for text in way.values.words(word)]
            current = [way]
            for item in items[:MAX_ITEMS] or [way.values.unknowns.mark(f"${node.variable}")]:
                for one in current:
                    one.values.variables[node.variable] = item
                current = self.run(node.body, current)
            kept += current
        return kept[:MAX_WAYS]

    def holds(self, condition: list[Node], way: Way) -> bool | None:
        """Return whether a condition holds, None where the file does not say."""
        last = condition[-1] if condition else None
        if isinstance(last, Pipe) and last.negated and len(last.commands) == 1:
            inner = self.holds(last.commands, way)
            return None if inner is None else not inner
        if isinstance(last, AndOr):
            left, right = self.holds([last.left], way), self.holds([last.right], way)
            strong = last.operator == "||"  # the answer that one side alone settles
            if strong in (left, right):
                return strong
            return None if None in (left, right) else not strong
        if isinstance(last, Test):
            return decided([way.values.text(word) for word in last.words], double=True)
        if isinstance(last, Arithmetic):
            return arithmetic(last.text, way.values)
        if isinstance(last, Simple) and last.items:
            words = [token.word.literal or "" for token in last.items[:1] if token.word is not None]
            if words and words[0] in BUILT_IN_TESTS:
                texts = [way.values.text(token.word) for token in last.items]
                return decided(texts)
            self.commands.simple(last, way)
        return None

    def is_test(self, node: Node) -> bool:
        if isinstance(node, AndOr):
            return self.is_test(node.left) and self.is_test(node.right)
        if isinstance(node, Pipe):
            return node.negated and len(node.commands) == 1 and self.is_test(node.commands[0])
        if isinstance(node, Simple) and node.items and node.items[0].word is not None:
            return (node.items[0].word.literal or "") in BUILT_IN_TESTS
        return isinstance(node, Test | Arithmetic)

    def pipe(self, node: Pipe, way: Way) -> list[Way]:
        ways = [way]
        echoed: list[str] = []
        for inner in node.commands:
            words = self.commands.words(inner.items, way) if isinstance(inner, Simple) else []
            if echoed and words[:1] == ["xargs"]:
                ways = self.commands.launch(inner, [*words, *echoed], way)
            else:
                ways = self.one(inner, ways)
            says = words[:1] in (["echo"], ["printf"])
            echoed = [piece for word in words[1:] for piece in word.split()] if says else []
        return ways

    def told(self, at: int, text: str, word: str) -> str:
        """Return a decision as a report shows it."""
        return f"line {self.commands.line(at)}, {word} {' '.join(text.split()):.100}"
