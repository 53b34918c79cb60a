"""`evaluate_arithmetic`: the value of `$((A + B))`, if each variable in it is a whole number.

The expression is parsed as Python, whose arithmetic has the same operators and the same order of
evaluation. The differences are handled here: bash has 64 bits, and has other literals. A value
beyond 64 bits stays open, and so does the value of another operator than `+`, `-`, `*` and `/`.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

DECIMAL_PATTERN = re.compile(r"-?(?:0|[1-9]\d{0,17})")
"""A decimal number. Bash reads `010` as octal, so a leading zero does not match."""
VARIABLE_PATTERN = re.compile(r"(?<![\w$])(?:\$?([A-Za-z_]\w*)|\$\{(\w+)\})(?!\w)")
"""A variable of an expression: `A`, `$A` or `${A}`."""
MAX_EXPRESSION_LENGTH = 1_000
NUMBER_LIMIT = 2**63
"""The first number that does not fit into bash's 64 bits."""
PYTHON_ONLY_PATTERN = re.compile(r"[_#]")
"""Characters with another meaning in Python. `1_000` is a number only in Python. `2#101` is 5 in
bash; Python reads 2 and a comment."""


def evaluate_arithmetic(piece: str, values: Mapping[str, Mapping[int, str]]) -> str | None:
    """Return the value of `$((...))` as bash prints it.

    Args:
        piece: A piece of a word as it is written.
        values: The elements of each variable that the script has set.

    Returns:
        The number as text. None if the piece is no arithmetic, if only the run decides a part of
        it, or if it has an operator that is not read.
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
    """Return the value of a tree of whole numbers.

    Raises:
        ValueError: The tree has another node, or a number does not fit into 64 bits.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return _require_64_bits(node.value)
    if isinstance(node, ast.BinOp):
        return _apply_operator(node.op, _evaluate_node(node.left), _evaluate_node(node.right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left = _evaluate_node(node.left)
        right = _evaluate_node(node.comparators[0])
        return int(_apply_comparison(node.ops[0], left, right))
    raise ValueError(ast.dump(node))


def _apply_operator(sign: ast.operator, left: int, right: int) -> int:
    """Return the result of `+`, `-`, `*` or `/` as bash computes it.

    Raises:
        ValueError: The operator is another one, a quotient is negative, or the result does not fit into
            64 bits.
        ZeroDivisionError: The divisor is 0.
    """
    if isinstance(sign, ast.Add):
        return _require_64_bits(left + right)
    if isinstance(sign, ast.Sub):
        return _require_64_bits(left - right)
    if isinstance(sign, ast.Mult):
        return _require_64_bits(left * right)
    if isinstance(sign, ast.Div) and left >= 0 and right >= 0:
        return left // right  # bash rounds a negative quotient otherwise than Python
    raise ValueError(ast.dump(sign))


def _apply_comparison(sign: ast.cmpop, left: int, right: int) -> bool:
    """Return whether a comparison of two numbers holds.

    Raises:
        ValueError: The comparison is another one, such as `in`.
    """
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
    """Return a number that fits into bash's 64 bits; ValueError for any other number."""
    if abs(value) >= NUMBER_LIMIT:
        raise ValueError(value)
    return value
