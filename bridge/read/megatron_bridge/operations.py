"""Python's operators, builtin functions and methods, applied to plain values of a followed program.

Only operations of the tables are applied. They change nothing, and files of Megatron Bridge use them.
For any other operation `UnknownValue` is raised, and the result is open.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bridge.read.megatron_bridge.values import (
    Class,
    ImportedName,
    Object,
    Value,
    evaluate_truth,
    is_open,
    is_plain,
)

MAX_RESULT_SIZE = 4096
"""Most elements of a list, or characters of a text, that `*` and `range` make."""


class UnknownValue(Exception):  # noqa: N818  it is no fault: the result is open
    """The result of an operation is known only when the program runs."""


BINARY_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, holder: item in holder,
    ast.NotIn: lambda item, holder: item not in holder,
}
BUILTINS: Mapping[str, Callable[..., Any]] = {
    "bool": bool,
    "divmod": divmod,
    "float": float,
    "int": int,
    "list": list,
    "max": max,
    "min": min,
    "range": lambda *ends: list(_require_short(range(*ends))),
}
BUILTIN_TYPES: Mapping[str, type] = {
    "bool": bool,
    "dict": dict,
    "float": float,
    "int": int,
    "list": list,
    "set": set,
    "str": str,
    "tuple": tuple,
}
PURE_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(("lower", "join")),
    dict: frozenset(("get",)),
    list: frozenset(("copy",)),
}
"""Type -> its methods that change nothing."""


def evaluate_binary(kind: type[ast.operator], left: Value, right: Value) -> Value:
    """Return the result of an operator on two plain values.

    Raises:
        UnknownValue: A value is not plain, or the result would be large.
    """
    if kind not in BINARY_OPERATORS or not (is_plain(left) and is_plain(right)):
        raise UnknownValue
    if kind is ast.Mult:
        _refuse_long_repetition(left, right)
    return _apply(BINARY_OPERATORS[kind], left, right)


def _refuse_long_repetition(left: Value, right: Value) -> None:
    """Refuse a list or a text that is repeated too often.

    Raises:
        UnknownValue: The result would have more than `MAX_RESULT_SIZE` elements.
    """
    for items, times in ((left, right), (right, left)):
        if (
            isinstance(items, Sequence)
            and isinstance(times, int)
            and len(items) * times > MAX_RESULT_SIZE
        ):
            raise UnknownValue


def evaluate_unary(kind: ast.unaryop, operand: Value) -> Value:
    """Return the result of `not` or a minus on a value.

    Raises:
        UnknownValue: The value is open, or the operator is another one.
    """
    if isinstance(kind, ast.Not):
        answer = evaluate_truth(operand)
        if answer is None:
            raise UnknownValue
        return not answer
    if isinstance(kind, ast.USub) and isinstance(operand, int | float):
        return -operand
    raise UnknownValue


def get_item(holder: Value, index: Value) -> Value:
    """Return an item of a mapping.

    Raises:
        UnknownValue: The value is not a mapping, or has no such item.
    """
    if not isinstance(holder, dict) or not is_plain(index):
        raise UnknownValue
    return _apply(operator.getitem, holder, index)


def add_elements(before: Value, name: str, added: Value) -> Value:
    """Return a list or a mapping with the elements that a method adds.

    Args:
        before: The list or the mapping.
        name: `append`, `extend` or `update`.
        added: The argument of the method. The result is open if its elements are not known.
    """
    if name == "append" and isinstance(before, list):
        return [*before, added]
    if name == "update" and isinstance(before, dict) and isinstance(added, dict):
        return {**before, **added}
    return Object(decider=f"`{name}` with what only the run knows,")


def evaluate_comparison(kind: type[ast.cmpop], left: Value, right: Value) -> bool:
    """Return the answer of a comparison.

    Raises:
        UnknownValue: The answer is known only when the program runs.
    """
    if kind in (ast.Is, ast.IsNot):
        return _is_same_object(left, right) is (kind is ast.Is)
    if not (is_plain(left) and is_plain(right)):
        raise UnknownValue
    return bool(_apply(COMPARISONS[kind], left, right))


def _is_same_object(left: Value, right: Value) -> bool:
    """Return whether `left is right` holds, if one of the two is None or a bool.

    Raises:
        UnknownValue: A value is open, or of another type, whose identity depends on the interpreter.
    """
    if is_open(left) or is_open(right):
        raise UnknownValue
    for value in (left, right):
        if value is None or isinstance(value, bool):
            return left is right
    raise UnknownValue


def call_builtin(name: str, arguments: Sequence[Value], options: Mapping[str, Value]) -> Value:
    """Return the result of a builtin function on plain values.

    Raises:
        UnknownValue: A value is not plain, or the function is not in the tables.
    """
    if name == "isinstance" and len(arguments) == 2:
        return evaluate_isinstance(*arguments)
    function = BUILTINS.get(name)
    if function is None or options or not all(map(is_plain, arguments)):
        raise UnknownValue
    return _apply(function, *arguments)


def evaluate_isinstance(value: Value, kinds: Value) -> bool:
    """Return the answer of `isinstance`.

    Args:
        kinds: A class, or a tuple of classes.

    Raises:
        UnknownValue: The answer is known only when the program runs.
    """
    if is_open(value):
        raise UnknownValue
    if not isinstance(kinds, tuple):
        kinds = (kinds,)
    # Every class is checked before an answer counts, so that an unknown class makes the answer unknown.
    answers = [_is_instance(value, kind) for kind in kinds]
    return any(answers)


def _is_instance(value: Value, kind: Value) -> bool:
    """Return whether a value is an instance of a class.

    Raises:
        UnknownValue: The class is not known, or may be a base of the object's class.
    """
    if not isinstance(kind, ImportedName | Class):
        raise UnknownValue
    if is_plain(value):
        builtin_type = BUILTIN_TYPES.get(kind.path)
        return builtin_type is not None and isinstance(value, builtin_type)
    if isinstance(value, Object):
        if kind.path == value.kind:
            return True
        if kind.path in BUILTIN_TYPES:
            return False
    raise UnknownValue


def call_method(
    holder: Value, name: str, arguments: Sequence[Value], options: Mapping[str, Value]
) -> Value:
    """Return the result of a method of a plain value.

    Raises:
        UnknownValue: The method may change the value, or a value is not plain.
    """
    is_pure = name in PURE_METHODS.get(type(holder), ())
    if not is_pure or not is_plain(holder) or not all(map(is_plain, arguments)) or options:
        raise UnknownValue
    return _apply(getattr(holder, name), *arguments)


def _require_short(items: range) -> range:
    """Return a range of at most `MAX_RESULT_SIZE` elements.

    Raises:
        UnknownValue: The range has more elements.
    """
    if len(items) > MAX_RESULT_SIZE:
        raise UnknownValue
    return items


def _apply(function: Callable[..., Any], *arguments: Value) -> Value:
    """Return the result of a function.

    Raises:
        UnknownValue: The function raises an error for these arguments.
    """
    try:
        result: Value = function(*arguments)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError):
        raise UnknownValue from None
    return result
