"""The training runs that a launch script starts, found without running it.

`launches(text)` follows assignments, arrays, branches, loops, functions, `eval` and `bash -c` the way bash would and
notes every command that starts a Python program. Where a branch depends on something the file does not say, each way
through that leads to another precision is followed and the launch says which way it took.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from bridge.interop.shell_choices import Branches, united
from bridge.interop.shell_commands import Commands
from bridge.interop.shell_condition import arithmetic, decided
from bridge.interop.shell_syntax import parse
from bridge.interop.shell_trainings import trainings
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
    stated = dict(variables or {})
    unknowns = Unknowns()
    nodes, lexer = parse(text, path)
    reader = _Reader(lexer, unknowns)
    ways = reader.run(nodes, [Way(Values(unknowns, stated, stated))])
    found = [launch for way in ways for launch in way.finished()]
    for name, body in list(reader.commands.functions.items()):
        if all(launch.is_printed for launch in found) and name not in reader.commands.called:
            found += [launch for way in reader.run(body, [way.copy() for way in ways]) for launch in way.finished()]
    return trainings(distinct(found or [held(way) for way in ways]))


class _Reader:
    """Follows the tree; `Commands` follows its leaves."""

    def __init__(self, lexer: Lexer, unknowns: Unknowns) -> None:
        self.lexer = lexer
        self.steps = 0
        self.branches = Branches()
        self.commands = Commands(self.run, lexer, unknowns)

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
            about: list[object] = [one.precision() for one in found] if len(found) > 1 else []
            kinds: dict[int, list[Way]] = {}
            for place, one in enumerate(found):
                kinds.setdefault(about.index(about[place]) if about else place, []).append(one)
            for first, *others in kinds.values():
                first.join(others)
                if len(kinds) == 1 and others:
                    first.paths = way.paths
                elif others:
                    first.paths = united(path for one in (first, *others) for path in one.paths)
                kept.append(first)
        return self.limited(kept)

    def limited(self, ways: list[Way]) -> list[Way]:
        """Return the first ways, which say so where there are too many."""
        if len(ways) > MAX_WAYS:
            ways = ways[:MAX_WAYS]
            for way in ways:
                way.note(f"more than {MAX_WAYS} ways through the script")
        return ways

    # -- branches ----------------------------------------------------------------------------------------------------

    def conditional(self, node: If, way: Way) -> list[Way]:
        open_: list[tuple[Way, list[Node], str]] = []
        last: list[Node] = node.otherwise or []
        passed = []
        for place, branch in enumerate(node.branches):
            answer = self.holds(branch.condition, way)
            if answer is True:
                last = branch.body
                break
            passed.append(branch.text)
            if answer is None:
                text = self.told(branch.start, branch.text, "elif" if place else "if")
                open_.append((way.copy(), branch.body, text))
        if not open_:
            return self.run(last, [way.copy()])
        neither = self.told(node.start, " nor ".join(passed), "not" if len(passed) == 1 else "neither")
        return self.taken([*open_, (way.copy(), last, neither)], node)

    def taken(self, branches: list[tuple[Way, list[Node], str]], node: Node) -> list[Way]:
        """Follow each alternative of an undecided branch."""
        found = []
        choices = self.branches.alternatives(node.start, [text for _, _, text in branches])
        for choice, (way, body, _) in zip(choices, branches, strict=True):
            way.take(choice)
            found += self.run(body, [way])
        return found

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
        text = self.lexer.text[node.start : node.end]
        yes, no = self.branches.alternatives(node.start, [self.told(node.start, text, word) for word in ("if", "not")])
        taken = way.copy()
        taken.take(yes)
        way.take(no)
        return [(taken, True), (way, False)]

    def case(self, node: Case, way: Way) -> list[Way]:
        subject = way.values.text(node.subject)
        shown = self.commands.shown(subject)
        open_: list[tuple[Way, list[Node], str]] = []
        passed = []
        for patterns, body, text, start in node.arms:
            texts = [way.values.text(pattern) for pattern in patterns]
            passed.append(text)
            if "*" in texts:
                certain = True
            elif is_unknown(subject) or any(map(is_unknown, texts)):
                certain = False
            elif any(fnmatchcase(subject, pattern) for pattern in texts):
                certain = True
            else:
                continue
            if certain and not open_:
                return self.run(body, [way])
            open_.append((way.copy(), body, self.told(start, f"case {shown} in {text})", "if")))
            if certain:
                return self.taken(open_, node)
        if not open_:
            return [way]
        word = "neither" if len(passed) > 1 else "not"
        neither = self.told(node.start, f"{shown} is {word} {' nor '.join(passed)}", "case")
        return self.taken([*open_, (way, [], neither)], node)

    def loop(self, node: Loop, ways: list[Way]) -> list[Way]:
        if node.variable is None or node.items is None:
            if node.variable is not None:
                for way in ways:
                    way.values.variables[node.variable] = way.values.unknown(node.variable)
            return self.run(node.body, ways)
        kept = []
        for way in ways:
            items = [text for word in node.items for text in way.values.words(word)]
            if len(items) > MAX_ITEMS:
                way.note(f"more than {MAX_ITEMS} rounds of the loop on line {self.commands.line(node.start)}")
            current = [way]
            for item in items[:MAX_ITEMS] or [way.values.unknown(node.variable)]:
                for one in current:
                    one.values.variables[node.variable] = one.values.stated_or(node.variable, item)
                current = self.run(node.body, current)
            kept += current
        return self.limited(kept)

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
        for inner in node.commands:
            ways = self.one(inner, ways)
        return ways

    def told(self, at: int, text: str, word: str) -> str:
        """Return a decision as a report shows it."""
        return f"line {self.commands.line(at)}, {word} {' '.join(text.split()):.100}"
