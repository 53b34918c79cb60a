"""`Test`: the answer of a condition with nothing set, and the variables that it depends on."""

from __future__ import annotations

import operator
import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from bridge.interop.launch.word import Word, variable_of

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
        holds = (self.holds or other.holds) if is_or else (self.holds and other.holds)
        is_decided = any(side.holds is is_or and not side.is_open for side in (self, other))
        return Test(holds, (self.is_open or other.is_open) and not is_decided, self.defaults + other.defaults)


def answer(words: Sequence[str]) -> Test:
    """Return what the words inside `[ ... ]` or `[[ ... ]]` say; a text is a pattern in both."""
    for signs, is_or in JOINTS:
        for place in range(1, len(words) - 1):
            if words[place] in signs:
                return answer(words[:place]).joined(answer(words[place + 1 :]), is_or=is_or)
    words = [word for word in words if word not in ("(", ")")]
    if words[:1] == ["!"]:
        return answer(words[1:]).negated
    equal = _equality(words[0], [words[2]]) if len(words) == 3 and words[1] in EQUALITY else None
    return _test(words, _compared([Word.of(word).with_nothing_set for word in words]), equal)


def matched(subject: str, patterns: Sequence[str]) -> Test:
    """Return whether one of the patterns of a `case` is that of a text."""
    if "*" in patterns:
        return Test(holds=True, is_open=False)
    value, *others = (Word.of(word).with_nothing_set for word in (subject, *patterns))
    return _test([subject], any(fnmatchcase(value, other) for other in others), _equality(subject, patterns[:1]))


def _test(words: Sequence[str], holds: bool | None, equal: tuple[str, str] | None) -> Test:
    known = [Word.of(word) for word in words]
    defaults = tuple(name for word in known for name in word.defaults)
    return Test(bool(holds), holds is None or any(word.is_unknown for word in known), defaults, equal)


def _compared(words: list[str]) -> bool | None:
    """Return the answer of a comparison, None for one that is not known here."""
    if len(words) == 1:
        return bool(words[0])
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return bool(words[1]) == (words[0] == "-n")
    if len(words) != 3:
        return None
    left, sign, right = words
    if sign in EQUALITY:
        return fnmatchcase(left, right) == (sign != "!=")
    if sign in NUMERIC and INTEGER.fullmatch(left) and INTEGER.fullmatch(right):
        return bool(NUMERIC[sign](int(left), int(right)))
    return None


def _equality(one: str, others: Sequence[str]) -> tuple[str, str] | None:
    """Return variable and value where a variable that nothing sets is compared with a text that it has not."""
    for side, other in [(one, other) if variable_of(one) else (other, one) for other in others]:
        variable, text = variable_of(side), Word.of(other)
        value = text.replace("*", "")
        if variable and value and not text.is_unknown and not fnmatchcase(Word.of(side).with_nothing_set, text):
            return variable, value
    return None
