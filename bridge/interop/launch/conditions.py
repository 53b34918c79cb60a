"""`Test`: the answer of a condition with nothing set, and the variables that it depends on."""

from __future__ import annotations

import operator
import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from bridge.interop.launch.word import Word

if TYPE_CHECKING:
    from collections.abc import Sequence

EQUALITY = frozenset({"=", "==", "!="})
NUMERIC = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
JOINTS = ({"||", "-o"}, True), ({"&&", "-a"}, False)
INTEGER = re.compile(r"\s*-?\d{1,18}\s*")


class Test(NamedTuple):
    """The answer of a condition."""

    holds: bool
    """With nothing set, and with the defaults of the script."""
    is_open: bool = True
    """Only the run decides it."""
    defaults: tuple[str, ...] = ()
    """Variables that nothing sets, and whose defaults decide here."""
    equal: tuple[str, str] | None = None
    """A variable that nothing sets, and the value with which it would be answered otherwise."""
    asks: frozenset[str] = frozenset()
    """Variables that nothing sets, of which another value may change the answer than that of `equal`."""

    @property
    def is_free(self) -> bool:
        """Whether it may be answered otherwise."""
        return self.is_open or bool(self.defaults)

    @property
    def negated(self) -> Test:
        """The answer of `! condition`."""
        return self._replace(holds=not self.holds)

    def joined(self, other: Test, *, is_or: bool) -> Test:
        """Return what two conditions say together."""
        sides = (self, other)
        holds = any(side.holds for side in sides) if is_or else all(side.holds for side in sides)
        is_decided = any(side.holds is is_or and not side.is_open for side in sides)
        is_open = any(side.is_open for side in sides) and not is_decided
        asks = self.asks.union(other.asks, *(side.equal[:1] for side in sides if side.equal))
        return Test(holds, is_open, self.defaults + other.defaults, asks=asks)


def answer(words: Sequence[Word], *, is_double: bool) -> Test:
    """Return what the words inside `[ ... ]` or, where `is_double`, `[[ ... ]]` say."""
    for signs, is_or in JOINTS:
        for place in range(1, len(words) - 1):
            if words[place] in signs:
                left, right = (answer(side, is_double=is_double) for side in (words[:place], words[place + 1 :]))
                return left.joined(right, is_or=is_or)
    words = [word for word in words if word not in ("(", ")")]
    if words[:1] == ["!"]:
        return answer(words[1:], is_double=is_double).negated
    equal = _equality(words[0], words[2]) if len(words) == 3 and words[1] in EQUALITY else None
    is_pattern = is_double and any("*" in word for word in words)
    return _test(words, _compared([word.with_nothing_set for word in words], is_double), equal, is_pattern=is_pattern)


def matched(subject: Word, patterns: Sequence[Word]) -> Test:
    """Return whether one of the patterns of a `case` is that of a text."""
    if "*" in patterns:
        return Test(holds=True, is_open=False)
    holds = any(fnmatchcase(subject.with_nothing_set, pattern.with_nothing_set) for pattern in patterns)
    equal = _equality(subject, next(filter(None, patterns), Word()))
    return _test([subject], holds, equal, is_pattern=len(patterns) > 1 or any("*" in one for one in patterns))


def _test(words: Sequence[Word], holds: bool | None, equal: tuple[str, str] | None, *, is_pattern: bool) -> Test:
    is_open = holds is None or any(word.is_unknown for word in words)
    defaults = tuple(name for word in words for name in word.defaults)
    asks = frozenset(name for word in words for name in word.names)
    return Test(bool(holds), is_open, defaults, equal, asks if equal is None or is_pattern else asks - {equal[0]})


def _compared(words: list[str], is_double: bool) -> bool | None:
    """Return the answer of a comparison, None for one that is not known here."""
    if len(words) == 1:
        return bool(words[0])
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return bool(words[1]) == (words[0] == "-n")
    if len(words) != 3:
        return None
    left, sign, right = words
    if sign in EQUALITY:
        return (fnmatchcase(left, right) if is_double else left == right) == (sign != "!=")
    if sign in NUMERIC and INTEGER.fullmatch(left) and INTEGER.fullmatch(right):
        return bool(NUMERIC[sign](int(left), int(right)))
    return None


def _equality(one: Word, other: Word) -> tuple[str, str] | None:
    """Return variable and value where a variable that nothing sets is compared with a text."""
    side, text = (one, other) if one.variable else (other, one)
    value = text.replace("*", "")
    is_so = fnmatchcase(side.with_nothing_set, text)
    return (side.variable, value) if side.variable and value and not text.is_unknown and not is_so else None
