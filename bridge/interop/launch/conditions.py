"""The words of a test: what `[ ... ]` and `[[ ... ]]` say as far as the script decides it."""

from __future__ import annotations

import operator
import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from bridge.interop.launch.variables import is_unknown

if TYPE_CHECKING:
    from tree_sitter import Node

EQUALITY = frozenset({"=", "==", "!="})
NUMERIC = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
INTEGER = re.compile(r"\s*-?\d{1,18}\s*")


def is_arithmetic(node: Node) -> bool:
    """Return whether a node is `(( ... ))`."""
    return node.type == "compound_statement" and node.children[0].type == "(("


def is_test(node: Node) -> bool:
    """Return whether a command is a test, or several of them joined."""
    if node.type == "list":
        return is_test(node.children[0]) and is_test(node.children[-1])
    return node.type in ("test_command", "negated_command") or is_arithmetic(node)


def either(strong: bool, *sides: bool | None) -> bool | None:
    """Return what two sides of `||` (`strong` is True) or `&&` (False) say together."""
    if strong in sides:
        return strong
    return None if None in sides else not strong


def decided(words: list[str], *, double: bool) -> bool | None:
    """Return what the words inside `[ ... ]` or, with `double`, `[[ ... ]]` say; None where only the run decides."""
    for joint, strong in ((("||", "-o"), True), (("&&", "-a"), False)):
        for word in joint:
            if word in words[1:-1]:
                place = words.index(word, 1)
                return either(strong, *(decided(side, double=double) for side in (words[:place], words[place + 1 :])))
    words = [word for word in words if word not in ("(", ")")]
    if words[:1] == ["!"]:
        inner = decided(words[1:], double=double)
        return None if inner is None else not inner
    if any(map(is_unknown, words)):
        return None
    if len(words) == 1:
        return bool(words[0])
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return bool(words[1]) == (words[0] == "-n")
    if len(words) != 3:
        return None
    left, sign, right = words
    if sign in EQUALITY:
        equal = fnmatchcase(left, right) if double else left == right
        return equal == (sign != "!=")
    if sign == "=~" and re.fullmatch(r"[\w^$-]+", right):
        return re.search(right, left) is not None
    if sign in NUMERIC and INTEGER.fullmatch(left) and INTEGER.fullmatch(right):
        return bool(NUMERIC[sign](int(left), int(right)))
    return None
