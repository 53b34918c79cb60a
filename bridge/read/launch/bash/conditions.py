"""`ConditionResult`: the answer of a condition of a script, with nothing set in its environment.

answer_of_words(["$MODE", "==", "fp8"])    # holds=False, is_free=True, equal=("MODE", "fp8")
answer_of_words(["2", "-gt", "1"])         # holds=True, is_free=False: the file decides
"""

from __future__ import annotations

import operator
import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from bridge.read.launch.shell_word import ShellWord, get_variable_name

if TYPE_CHECKING:
    from collections.abc import Sequence

NUMERIC_OPERATORS = {
    f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
INTEGER_PAIR_PATTERN = re.compile(r"-?\d{1,18} -?\d{1,18}")


class ConditionResult(NamedTuple):
    """The answer of a condition."""

    holds: bool
    """The answer with nothing set, and with the defaults of the script."""
    is_undecided: bool = True
    """Whether the run may answer it otherwise."""
    equal: tuple[str, str] | None = None
    """A variable that nothing sets, and a value with which the condition has the other answer."""

    @property
    def negated(self) -> ConditionResult:
        """The answer of `! condition`."""
        return self._replace(holds=not self.holds)


def evaluate_test_words(words: Sequence[str]) -> ConditionResult:
    """Return the answer of the words inside `[ ... ]`.

    Only the run has the answer of more than one comparison.
    """
    if words[:1] == ["!"]:
        return evaluate_test_words(words[1:]).negated
    if len(words) == 1 or (len(words) == 2 and words[0] in ("-n", "-z")):
        is_empty = compare_with_pattern(words[-1], "")
        if words[0] == "-z":
            return is_empty
        return is_empty.negated
    if len(words) != 3:
        return ConditionResult(holds=False)
    sign = words[1]
    left = ShellWord.from_text(words[0])
    right = ShellWord.from_text(words[2])
    if sign in NUMERIC_OPERATORS and INTEGER_PAIR_PATTERN.fullmatch(f"{left} {right}"):
        is_free = bool(left.defaults or right.defaults)
        return ConditionResult(NUMERIC_OPERATORS[sign](int(left), int(right)), is_free)
    if sign in ("=", "=="):
        return compare_with_pattern(words[0], words[2])
    if sign == "!=":
        return compare_with_pattern(words[0], words[2]).negated
    return ConditionResult(holds=False)


def match_case_patterns(subject: str, patterns: Sequence[str]) -> ConditionResult:
    """Return whether a pattern of a `case` fits a text."""
    if "*" in patterns:
        return ConditionResult(holds=True, is_undecided=False)
    if not patterns:
        return ConditionResult(holds=False)
    answers = [compare_with_pattern(subject, pattern) for pattern in patterns]
    is_free = any(answer.is_undecided for answer in answers)
    for answer in answers:
        if answer.holds:
            return answer._replace(is_undecided=is_free)
    return answers[0]._replace(is_undecided=is_free)


def compare_with_pattern(text: str, pattern: str) -> ConditionResult:
    """Return whether a text is like a pattern."""
    left = ShellWord.from_text(text)
    right = ShellWord.from_text(pattern)
    is_free = any(word.is_unknown or word.defaults for word in (left, right))
    if fnmatchcase(left.text_when_unset, right.text_when_unset):
        return ConditionResult(True, is_free)
    variable = get_variable_name(text)
    value = right.replace("*", "")
    if variable and value and not right.is_unknown:
        return ConditionResult(False, is_free, equal=(variable, value))
    return ConditionResult(False, is_free)
