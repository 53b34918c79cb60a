"""The training runs that a launch script starts, found without running it.

`launches(text)` follows assignments, arrays, branches, loops, functions, `eval` and `bash -c` the way bash would and
notes every command that starts a Python program. Where a branch depends on something the file does not say, each way
through that leads to another precision is followed and the launch says which way it took.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from bridge.errors import PayloadError
from bridge.interop.shell_alternatives import BUILT_IN_TESTS, MAX_STEPS, Alternatives, is_test
from bridge.interop.shell_choices import Branches, united
from bridge.interop.shell_commands import Commands
from bridge.interop.shell_condition import arithmetic, decided
from bridge.interop.shell_runs import collected, distinct, held
from bridge.interop.shell_syntax import parse
from bridge.interop.shell_trainings import trainings
from bridge.interop.shell_tree import AndOr, Arithmetic, Case, Define, Group, If, Loop, Node, Pipe, Simple, Test
from bridge.interop.shell_values import Unknowns, Values, is_unknown
from bridge.interop.shell_variables import BEGIN, END
from bridge.interop.shell_ways import Way

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from bridge.interop.launch import Launch
    from bridge.interop.shell_words import Lexer

__all__ = ["launches"]

MAX_WAYS = 16
MAX_ITEMS = 16
NAME = re.compile(r"[A-Za-z_]\w*")
UNPRINTABLE = "\ufffd"


def launches(text: str, path: str = "<script>", variables: Mapping[str, str] | None = None) -> tuple[Launch, ...]:
    """Return every launch of a script; without any, one made of the arguments that its variables hold.

    Args:
        text: The script.
        path: What it is called in messages.
        variables: What the environment sets, where somebody knows it.

    Raises:
        PayloadError: The script is broken: a quote, a bracket or a block that is never closed.
    """
    stated = {name: _plain(value) for name, value in (variables or {}).items()}
    unknowns = Unknowns()
    nodes, lexer = parse(_plain(text), path)
    reader = _Reader(lexer, unknowns)
    try:
        ways = reader.run(nodes, [Way.first(Values(unknowns, stated, stated))])
        found = collected(ways)
        for name, body in list(reader.commands.functions.items()):
            if all(launch.is_printed for launch in found) and name not in reader.commands.called:
                found += collected(reader.run(body, [way.copy() for way in ways]))
    except RecursionError:
        raise PayloadError(f"{path}: commands are nested too deeply to be followed. Simplify the script.") from None
    return trainings(distinct(found or [held(way) for way in ways]))


def _plain(text: str) -> str:
    """Return a text without the characters that mark unknown pieces."""
    return text.replace(BEGIN, UNPRINTABLE).replace(END, UNPRINTABLE)


class _Reader:
    """Follows the tree; `Commands` follows its leaves."""

    def __init__(self, lexer: Lexer, unknowns: Unknowns) -> None:
        self.lexer = lexer
        self.steps = 0
        self.branches = Branches()
        self.commands = Commands(self.run, lexer, unknowns)
        self.alternatives = Alternatives(self, lexer.text)

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
            return self.each(ways, lambda way: [one for one, _, _ in self.and_or(node, way)])
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
            names = {name for one in found[1:] for name in one.changed(found[0].values.variables)}
            about: list[object] = [one.precision(names) for one in found] if len(found) > 1 else []
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
        bodies = [branch.body for branch in node.branches] + [node.otherwise or []]
        open_: list[tuple[Way, list[Node], str]] = []
        last = len(node.branches)
        passed = []
        with way.values.watching() as read:
            for place, branch in enumerate(node.branches):
                answer = self.holds(branch.condition, way)
                if answer is True:
                    last = place
                    break
                passed.append(branch.text)
                if answer is None:
                    text = self.told(branch.start, branch.text, "elif" if place else "if")
                    open_.append((way.copy(), branch.body, text))
        if not open_:
            others = [body for place, body in enumerate(bodies) if place != last]
            return self.settled(way, bodies[last], others, read.origins)
        neither = self.told(node.start, " nor ".join(passed), "not" if len(passed) == 1 else "neither")
        return self.taken([*open_, (way.copy(), bodies[last], neither)], node, read.origins)

    def settled(self, way: Way, body: list[Node], others: list[list[Node]], used: set[str]) -> list[Way]:
        """Follow the body of a decided branch; where defaults decided it, look at what the others would have been."""
        before = way.copy() if used else None
        first = len(way.launches)
        ways = self.run(body, [way.copy()])
        if before is not None:
            self.alternatives.weigh(ways, before, others, used, first)
        return ways

    def taken(self, branches: list[tuple[Way, list[Node], str]], node: Node, used: set[str]) -> list[Way]:
        """Follow each alternative of an undecided branch; one that ends the script and starts nothing is left out."""
        first = len(branches[0][0].launches)
        left = [branch for branch in branches if not self.alternatives.is_idle(branch[0], branch[1])]
        found: list[list[Way]] = []
        choices = self.branches.alternatives(node.start, [text for _, _, text in left])
        for choice, (way, body, _) in zip(choices, left, strict=True):
            if len(left) > 1:
                way.take(choice)
            found.append(self.run(body, [way]))
        self.alternatives.compare(found, used, first)
        return [way for ways in found for way in ways] or [branches[-1][0]]

    def and_or(self, node: Node, way: Way) -> list[tuple[Way, bool | None, frozenset[str]]]:
        """Follow `a && b || c`.

        Returns:
            Each way, whether what ran last succeeded, None where nobody knows, and the defaults which that depends on.
        """
        if isinstance(node, AndOr):
            return self.joined(node, way)
        if not is_test(node):
            return [(one, None, frozenset()) for one in self.one(node, [way])]
        with way.values.watching() as read:
            answer = self.holds([node], way)
        about = frozenset(read.origins)
        if answer is not None:
            return [(way, answer, about)]
        told = [self.told(node.start, node.text, word) for word in ("if", "not")]
        yes, no = self.branches.alternatives(node.start, told)
        taken = way.copy()
        taken.take(yes)
        way.take(no)
        return [(taken, True, about), (way, False, about)]

    def joined(self, node: AndOr, way: Way) -> list[tuple[Way, bool | None, frozenset[str]]]:
        """Follow the two sides of `&&` or `||`."""
        wanted = node.operator == "&&"
        if self.alternatives.is_idle(way, [node.right]):  # whoever goes on has not taken it
            ways = [way] if is_test(node.left) else [one for one, _, _ in self.and_or(node.left, way)]
            return [(one, not wanted, frozenset()) for one in ways]
        first = len(way.launches)
        sides: list[list[tuple[Way, bool | None, frozenset[str]]]] = []
        lefts = self.and_or(node.left, way)
        for one, status, about in lefts:
            follows = status in (None, wanted)
            before = one.copy() if about and len(lefts) == 1 else None
            after = self.and_or(node.right, one) if follows else [(one, status, about)]
            if before is not None:
                others: list[list[Node]] = [[]] if follows else [[node.right]]
                self.alternatives.weigh([last for last, _, _ in after], before, others, about, first)
            if status is not None and follows:
                after = [(last, True if done is None else done, more) for last, done, more in after]
            sides.append([(last, done, about | more) for last, done, more in after])
        about = frozenset().union(*(about for _, _, about in lefts))
        if len(sides) > 1:
            self.alternatives.compare([[one for one, _, _ in side] for side in sides], about, first)
        return [found for side in sides for found in side]

    def case(self, node: Case, way: Way) -> list[Way]:
        with way.values.watching() as read:
            subject = way.values.text(node.subject)
            patterns = [[way.values.text(pattern) for pattern in arm[0]] for arm in node.arms]
        shown = self.commands.shown(subject)
        open_: list[tuple[Way, list[Node], str]] = []
        passed = []
        for texts, (_, body, text, start) in zip(patterns, node.arms, strict=True):
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
                others = [arm[1] for arm in node.arms if arm[1] is not body]
                return self.settled(way, body, [*others, []], read.origins)
            open_.append((way.copy(), body, self.told(start, f"case {shown} in {text})", "if")))
            if certain:
                return self.taken(open_, node, read.origins)
        if not open_:
            return self.settled(way, [], [arm[1] for arm in node.arms], read.origins)
        word = "neither" if len(passed) > 1 else "not"
        neither = self.told(node.start, f"{shown} is {word} {' nor '.join(passed)}", "case")
        return self.taken([*open_, (way, [], neither)], node, read.origins)

    def loop(self, node: Loop, ways: list[Way]) -> list[Way]:
        if node.variable is None or node.items is None:
            if node.variable is not None:
                for way in ways:
                    way.values.set(node.variable, way.values.unknown(node.variable))
            return self.run(node.body, ways)
        kept = []
        for way in ways:
            with way.values.watching() as read:
                items = [text for word in node.items for text in way.values.words(word)]
            if len(items) > MAX_ITEMS:
                way.note(f"more than {MAX_ITEMS} rounds of the loop on line {self.commands.line(node.start)}")
            current = [way]
            for item in items[:MAX_ITEMS] or [way.values.unknown(node.variable)]:
                for one in current:
                    one.values.set(node.variable, one.values.stated_or(node.variable, item), read)
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
            way.values.read_by(NAME.findall(last.expression))
            return arithmetic(last.expression, way.values)
        if isinstance(last, Simple) and last.items:
            words = [token.word.literal or "" for token in last.items[:1] if token.word is not None]
            if words and words[0] in BUILT_IN_TESTS:
                texts = [way.values.text(token.word) for token in last.items]
                return decided(texts)
            self.commands.simple(last, way)
        return None

    def pipe(self, node: Pipe, way: Way) -> list[Way]:
        ways = [way]
        for inner in node.commands:
            ways = self.one(inner, ways)
        return ways

    def told(self, at: int, text: str, word: str) -> str:
        """Return a decision as a report shows it."""
        return f"line {self.commands.line(at)}, {word} {' '.join(self.commands.shown(text).split()):.100}"
