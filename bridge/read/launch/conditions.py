"""`Answer`: the answer of a condition of a script, with nothing set in its environment.

answer_of_words(["$MODE", "==", "fp8"])    # holds=False, is_free=True, equal=("MODE", "fp8")
answer_of_words(["2", "-gt", "1"])         # holds=True, is_free=False: the file decides
"""

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


class Answer(NamedTuple):
    """The answer of a condition."""

    holds: bool
    """The answer with nothing set, and with the defaults of the script."""
    is_free: bool = True
    """Whether the run may answer it otherwise."""
    equal: tuple[str, str] | None = None
    """A variable that nothing sets, and a value with which the condition has the other answer."""

    @property
    def negated(self) -> Answer:
        """The answer of `! condition`."""
        return self._replace(holds=not self.holds)


def answer_of_words(words: Sequence[str]) -> Answer:
    """Return the answer of the words inside `[ ... ]`.

    Only the run has the answer of more than one comparison.
    """
    if words[:1] == ["!"]:
        return answer_of_words(words[1:]).negated
    if len(words) == 1 or (len(words) == 2 and words[0] in ("-n", "-z")):
        is_empty = compared(words[-1], "")
        if words[0] == "-z":
            return is_empty
        return is_empty.negated
    if len(words) != 3:
        return Answer(holds=False)
    sign = words[1]
    left = Word.of(words[0])
    right = Word.of(words[2])
    if sign in NUMERIC and INTEGERS.fullmatch(f"{left} {right}"):
        is_free = bool(left.defaults or right.defaults)
        return Answer(NUMERIC[sign](int(left), int(right)), is_free)
    if sign in ("=", "=="):
        return compared(words[0], words[2])
    if sign == "!=":
        return compared(words[0], words[2]).negated
    return Answer(holds=False)


def matched(subject: str, patterns: Sequence[str]) -> Answer:
    """Return whether a pattern of a `case` fits a text."""
    if "*" in patterns:
        return Answer(holds=True, is_free=False)
    if not patterns:
        return Answer(holds=False)
    answers = [compared(subject, pattern) for pattern in patterns]
    is_free = any(answer.is_free for answer in answers)
    for answer in answers:
        if answer.holds:
            return answer._replace(is_free=is_free)
    return answers[0]._replace(is_free=is_free)


def compared(text: str, pattern: str) -> Answer:
    """Return whether a text is like a pattern."""
    left = Word.of(text)
    right = Word.of(pattern)
    is_free = any(word.is_unknown or word.defaults for word in (left, right))
    if fnmatchcase(left.with_nothing_set, right.with_nothing_set):
        return Answer(True, is_free)
    variable = variable_of(text)
    value = right.replace("*", "")
    if variable and value and not right.is_unknown:
        return Answer(False, is_free, equal=(variable, value))
    return Answer(False, is_free)
