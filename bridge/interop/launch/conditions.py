"""Whether a test holds, as far as the file alone can say: True, False or None where the run decides."""

from __future__ import annotations

import operator
import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from bridge.interop.launch.values import is_unknown

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["decided"]

NUMERIC: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
INTEGER = re.compile(r"\s*-?\d{1,18}\s*")


def decided(words: list[str], *, double: bool = False) -> bool | None:
    """Return what the words inside `[ ... ]` or, with `double`, `[[ ... ]]` say."""
    return _either(words, double=double)


def _either(words: list[str], *, double: bool) -> bool | None:
    for joint, strong in ((("||", "-o"), True), (("&&", "-a"), False)):
        for word in joint:
            if word in words[1:-1]:
                place = words.index(word, 1)
                sides = (_either(words[:place], double=double), _either(words[place + 1 :], double=double))
                if strong in sides:
                    return strong
                return None if None in sides else not strong
    return _single([word for word in words if word not in ("(", ")")], double=double)


def _single(words: list[str], *, double: bool) -> bool | None:
    if words[:1] == ["!"]:
        inner = _single(words[1:], double=double)
        return None if inner is None else not inner
    if any(is_unknown(word) for word in words):
        return None
    if len(words) == 1:
        return bool(words[0])
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return bool(words[1]) == (words[0] == "-n")
    if len(words) != 3:
        return None
    left, sign, right = words
    if sign in ("=", "==", "!="):
        equal = fnmatchcase(left, right) if double else left == right
        return equal == (sign != "!=")
    if sign == "=~" and re.fullmatch(r"[\w^$-]+", right):
        return re.search(right, left) is not None
    if sign in NUMERIC and INTEGER.fullmatch(left) and INTEGER.fullmatch(right):
        return NUMERIC[sign](int(left), int(right))
    return None
