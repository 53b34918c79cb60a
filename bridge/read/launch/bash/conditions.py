"""`ConditionResult`: the result of a condition of a script, with nothing set in its environment.

    evaluate_test_words(["$MODE", "==", "fp8"])
    # holds=False, is_open=True, equal=("MODE", "fp8"): with MODE=fp8 it holds
    evaluate_test_words(["2", "-gt", "1"])
    # holds=True, is_open=False: the script decides

An open condition is followed with both results, each in a run of the interpreter.
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
"""Two numbers that fit into bash's 64 bits, with a blank between them."""


class ConditionResult(NamedTuple):
    """The result of a condition."""

    holds: bool
    """Whether it holds with nothing set from outside, and with the defaults of the script."""
    is_open: bool = True
    """Whether the result may be the other one in a run."""
    equal: tuple[str, str] | None = None
    """A variable that nothing sets, and a value with which the condition has the other result."""

    @property
    def negated(self) -> ConditionResult:
        """The result of `! condition`."""
        return self._replace(holds=not self.holds)


def evaluate_test_words(words: Sequence[str]) -> ConditionResult:
    """Return the result of the words inside `[ ... ]` or `[[ ... ]]`.

    One comparison is read. A longer test, and a test of a file such as `-f`, is open.
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
    left_text, sign, right_text = words
    left = ShellWord.from_text(left_text)
    right = ShellWord.from_text(right_text)
    if sign in NUMERIC_OPERATORS and INTEGER_PAIR_PATTERN.fullmatch(f"{left} {right}"):
        is_open = bool(left.defaults or right.defaults)
        return ConditionResult(NUMERIC_OPERATORS[sign](int(left), int(right)), is_open)
    if sign in ("=", "=="):
        return compare_with_pattern(left_text, right_text)
    if sign == "!=":
        return compare_with_pattern(left_text, right_text).negated
    return ConditionResult(holds=False)


def match_case_patterns(subject: str, patterns: Sequence[str]) -> ConditionResult:
    """Return whether one of the patterns of a `case` item fits a text."""
    if "*" in patterns:
        return ConditionResult(holds=True, is_open=False)
    if not patterns:
        return ConditionResult(holds=False)
    results = [compare_with_pattern(subject, pattern) for pattern in patterns]
    is_open = any(result.is_open for result in results)
    for result in results:
        if result.holds:
            return result._replace(is_open=is_open)
    return results[0]._replace(is_open=is_open)


def compare_with_pattern(text: str, pattern: str) -> ConditionResult:
    """Return whether a text fits a pattern of the shell, such as `*fp8*`."""
    left = ShellWord.from_text(text)
    right = ShellWord.from_text(pattern)
    is_open = any(word.is_open or word.defaults for word in (left, right))
    if fnmatchcase(left.text_when_unset, right.text_when_unset):
        return ConditionResult(True, is_open)
    variable = get_variable_name(text)
    value = right.replace("*", "")  # the shortest text that fits a pattern with stars
    if variable and value and not right.is_open:
        return ConditionResult(False, is_open, equal=(variable, value))
    return ConditionResult(False, is_open)
