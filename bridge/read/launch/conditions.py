"""`Test`: the answer of a condition with nothing set, and the value that answers it otherwise."""

from __future__ import annotations

import operator
import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from bridge.read.launch.word import Word, variable_of

if TYPE_CHECKING:
    from collections.abc import Sequence

NUMERIC = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
INTEGERS = re.compile(r"-?\d{1,18} -?\d{1,18}")


class Test(NamedTuple):
    """The answer of a condition."""

    holds: bool
    """With nothing set, and with the defaults of the script."""
    is_free: bool = True
    """The run may answer it otherwise."""
    equal: tuple[str, str] | None = None
    """A variable that nothing sets, and a value with which it is answered otherwise."""

    @property
    def negated(self) -> Test:
        """The answer of `! condition`."""
        return self._replace(holds=not self.holds)


def answer(words: Sequence[str]) -> Test:
    """Return the answer of the words inside `[ ... ]`.

    Only the run has the answer of more than one comparison.
    """
    if words[:1] == ["!"]:
        return answer(words[1:]).negated
    if len(words) == 1 or (len(words) == 2 and words[0] in ("-n", "-z")):
        is_empty = compared(words[-1], "")
        if words[0] == "-z":
            return is_empty
        return is_empty.negated
    if len(words) != 3:
        return Test(holds=False)
    sign = words[1]
    left = Word.of(words[0])
    right = Word.of(words[2])
    if sign in NUMERIC and INTEGERS.fullmatch(f"{left} {right}"):
        is_free = bool(left.defaults or right.defaults)
        return Test(NUMERIC[sign](int(left), int(right)), is_free)
    if sign in ("=", "=="):
        return compared(words[0], words[2])
    if sign == "!=":
        return compared(words[0], words[2]).negated
    return Test(holds=False)


def matched(subject: str, patterns: Sequence[str]) -> Test:
    """Return whether one of the patterns of a `case` is that of a text."""
    if "*" in patterns:
        return Test(holds=True, is_free=False)
    if not patterns:
        return Test(holds=False)
    tests = [compared(subject, pattern) for pattern in patterns]
    is_free = any(test.is_free for test in tests)
    for test in tests:
        if test.holds:
            return test._replace(is_free=is_free)
    return tests[0]._replace(is_free=is_free)


def compared(text: str, pattern: str) -> Test:
    """Return whether a text is like a pattern."""
    left = Word.of(text)
    right = Word.of(pattern)
    is_free = any(word.is_unknown or word.defaults for word in (left, right))
    if fnmatchcase(left.with_nothing_set, right.with_nothing_set):
        return Test(True, is_free)
    variable = variable_of(text)
    value = right.replace("*", "")
    if variable and value and not right.is_unknown:
        return Test(False, is_free, equal=(variable, value))
    return Test(False, is_free)
