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
    """Return the answer of the words inside `[ ... ]`; only the run has that of more than one comparison."""
    if words[:1] == ["!"]:
        return answer(words[1:]).negated
    if len(words) == 1 or (len(words) == 2 and words[0] in ("-n", "-z")):
        is_empty = compared(words[-1], "")
        return is_empty if words[0] == "-z" else is_empty.negated
    if len(words) != 3:
        return Test(holds=False)
    left, right = Word.of(words[0]), Word.of(words[2])
    if words[1] in NUMERIC and INTEGERS.fullmatch(f"{left} {right}"):
        return Test(
            NUMERIC[words[1]](int(left), int(right)), is_free=bool(left.defaults or right.defaults)
        )
    is_equal = compared(words[0], words[2])
    return {"=": is_equal, "==": is_equal, "!=": is_equal.negated}.get(words[1], Test(holds=False))


def matched(subject: str, patterns: Sequence[str]) -> Test:
    """Return whether one of the patterns of a `case` is that of a text."""
    if "*" in patterns:
        return Test(holds=True, is_free=False)
    tests = [compared(subject, pattern) for pattern in patterns] or [Test(holds=False)]
    is_free = any(test.is_free for test in tests)
    return next((test for test in tests if test.holds), tests[0])._replace(is_free=is_free)


def compared(text: str, pattern: str) -> Test:
    """Return whether a text is like a pattern."""
    left, right = Word.of(text), Word.of(pattern)
    is_free = any(word.is_unknown or word.defaults for word in (left, right))
    variable, value = variable_of(text), right.replace("*", "")
    if fnmatchcase(left.with_nothing_set, right.with_nothing_set):
        return Test(True, is_free)
    is_assumed = variable and value and not right.is_unknown
    return Test(False, is_free, (variable, value) if is_assumed else None)
