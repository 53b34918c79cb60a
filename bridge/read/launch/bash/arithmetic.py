"""`evaluate_arithmetic` returns the value of `$((A + B))` where each part is set to a whole number."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

DECIMAL_PATTERN = re.compile(r"-?(?:0|[1-9]\d{0,17})")
"""A number that bash reads as a decimal one."""
VARIABLE_PATTERN = re.compile(r"(?<![\w$])(?:\$?([A-Za-z_]\w*)|\$\{(\w+)\})(?!\w)")
"""A variable of an expression: `A`, `$A` or `${A}`."""
MAX_EXPRESSION_LENGTH = 1_000
NUMBER_LIMIT = 2**63
"""Numbers from here on are too large for bash."""
PYTHON_ONLY_PATTERN = re.compile(r"[_#]")
"""Signs with another meaning in Python: `1_000` is a number of Python alone, and `2#101` is 5 in bash
and a comment behind 2 in Python."""


def evaluate_arithmetic(piece: str, values: Mapping[str, Mapping[int, str]]) -> str | None:
    """Return the value of `$((...))`.

    It is None for another piece, and where the run decides a part of the piece.

    Args:
        piece: As it is written.
        values: The elements of each variable that the script has set.
    """
    if not (piece.startswith("$((") and piece.endswith("))")):
        return None
    expression = piece[3:-2]
    if len(expression) > MAX_EXPRESSION_LENGTH:
        return None
    for plain_name, braced_name in VARIABLE_PATTERN.findall(expression):
        elements = values.get(plain_name or braced_name, {})
        if DECIMAL_PATTERN.fullmatch(elements.get(0, "")) is None:
            return None
    text = VARIABLE_PATTERN.sub(lambda part: f"({values[part[1] or part[2]][0]})", expression)
    if PYTHON_ONLY_PATTERN.search(text):
        return None
    try:
        value = _evaluate_node(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return str(value)


def _evaluate_node(node: ast.expr) -> int:
    """Return the value of a tree of whole numbers; ValueError for anything else in it."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return _require_64_bits(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate_node(node.operand)
    if isinstance(node, ast.BinOp):
        return _apply_operator(node.op, _evaluate_node(node.left), _evaluate_node(node.right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return int(
            _apply_comparison(
                node.ops[0], _evaluate_node(node.left), _evaluate_node(node.comparators[0])
            )
        )
    raise ValueError(ast.dump(node))


def _apply_operator(sign: ast.operator, left: int, right: int) -> int:
    if isinstance(sign, ast.Add):
        return _require_64_bits(left + right)
    if isinstance(sign, ast.Sub):
        return _require_64_bits(left - right)
    if isinstance(sign, ast.Mult):
        return _require_64_bits(left * right)
    quotient = abs(left) // abs(right)  # bash rounds towards zero
    if (left < 0) != (right < 0):
        quotient = -quotient
    if isinstance(sign, ast.Div):
        return quotient
    if isinstance(sign, ast.Mod):
        return left - quotient * right
    raise ValueError(ast.dump(sign))


def _apply_comparison(sign: ast.cmpop, left: int, right: int) -> bool:
    """Return whether a comparison of two numbers holds; ValueError for another sign."""
    for kind, holds in (
        (ast.Lt, left < right),
        (ast.LtE, left <= right),
        (ast.Gt, left > right),
        (ast.GtE, left >= right),
        (ast.Eq, left == right),
        (ast.NotEq, left != right),
    ):
        if isinstance(sign, kind):
            return holds
    raise ValueError(ast.dump(sign))


def _require_64_bits(value: int) -> int:
    if abs(value) >= NUMBER_LIMIT:
        raise ValueError(value)
    return value
