"""`parse_list_expression`: the list of numbers that a field of Megatron's states as an expression of Python.

``moe_layer_freq`` and its kind are stated so: ``([0]*3+[1]*58)``.
"""

import ast
from contextlib import suppress
from typing import Any

MAX_LIST_LENGTH = 100_000
"""The limit of a repeated list; a slip in a count would fill the memory."""


def parse_list_expression(expression: str) -> list[Any] | None:
    """Return the list that an expression such as ``([0]*3+[1]*58)`` stands for.

    It is None for a number, and for an expression of another form, which is not evaluated.
    """
    value = None
    with suppress(ValueError, SyntaxError, TypeError):
        value = _evaluate_node(ast.parse(expression, mode="eval").body)
    if isinstance(value, list):
        return value
    return None


def _evaluate_node(node: ast.expr) -> Any:
    """Return the number or list of a part of an expression; ValueError for any other part."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        return list(map(_evaluate_node, node.elts))
    if isinstance(node, ast.BinOp):
        left, right = _evaluate_node(node.left), _evaluate_node(node.right)
        lists = [part for part in (left, right) if isinstance(part, list)]
        if isinstance(node.op, ast.Add) and len(lists) == 2:
            return left + right
        if isinstance(node.op, ast.Mult) and len(lists) == 1:
            times = left
            if isinstance(left, list):
                times = right
            if len(lists[0]) * times < MAX_LIST_LENGTH:
                return left * right
    raise ValueError("no number, list, sum of lists or repeated list")
