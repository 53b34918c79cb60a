"""`parse_list_expression`: a list of numbers, from a Python expression in a field of Megatron.

Fields such as ``moe_layer_freq`` are written in this form: ``([0]*3+[1]*58)``.
"""

import ast
from contextlib import suppress
from typing import Any

MAX_LIST_LENGTH = 100_000
"""The largest length of a list. A typing error in a count could fill the memory."""


def parse_list_expression(expression: str) -> list[Any] | None:
    """Return the list of an expression such as ``([0]*3+[1]*58)``.

    None for a number, and for an expression of another form. Such an expression is not evaluated.
    """
    value = None
    with suppress(ValueError, SyntaxError, TypeError):
        value = _evaluate_node(ast.parse(expression, mode="eval").body)
    if isinstance(value, list):
        return value
    return None


def _evaluate_node(node: ast.expr) -> Any:
    """Return the number or the list of a node of an expression.

    Raises:
        ValueError: The node is neither a number nor a list of numbers.
    """
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
