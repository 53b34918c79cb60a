"""Whole numbers as shell arithmetic computes them: `$((64 / TP))`."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["calculated"]

PLAIN = re.compile(r"[\w\s+*/%()-]{1,200}")
LARGEST = 2**62


def calculated(text: str, variables: Mapping[str, str | list[str]]) -> int | None:
    """Return what an arithmetic expression comes to, or None where the script alone does not say.

    Args:
        text: The expression, with or without dollars before its names.
        variables: What the script has set.
    """
    bare = re.sub(r"\$\{?(\w+)\}?", r"\1", text).strip()
    if not PLAIN.fullmatch(bare) or "**" in bare or re.search(r"\b0\d", bare):
        return None
    try:
        tree = ast.parse(bare, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return _value(tree.body, variables)


def _value(node: ast.expr, variables: Mapping[str, str | list[str]]) -> int | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value if node.value < LARGEST else None
    if isinstance(node, ast.Name):
        said = variables.get(node.id)
        return int(said) if isinstance(said, str) and re.fullmatch(r"-?[1-9]\d{0,17}|0", said.strip()) else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _value(node.operand, variables)
        return None if inner is None else -inner
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _value(node.left, variables), _value(node.right, variables)
    if left is None or right is None:
        return None
    return _applied(node.op, left, right)


def _applied(sign: ast.operator, left: int, right: int) -> int | None:
    if isinstance(sign, ast.Div | ast.Mod):
        if not right:
            return None
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)  # towards zero, as in C
        return quotient if isinstance(sign, ast.Div) else left - quotient * right
    result = {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}.get(type(sign))
    return result if result is not None and abs(result) < LARGEST else None
