"""Python's operators, builtin functions and methods, applied to plain values of a followed program.

Only operations that change nothing and make a value of limited size are applied. For any other one
`UnknownValue` is raised, and the result is open.
"""

from __future__ import annotations

import ast
import operator
import os.path
from collections.abc import Callable, Iterable, Mapping, Sequence
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
"""Most elements of a list, or characters of a text, that an operation makes."""
MAX_POWER_BASE = 10
MAX_EXPONENT = 64
"""Limits of a power, whose number of digits grows with both."""


class UnknownValue(Exception):  # noqa: N818  it is no fault: the result is open
    """The result of an operation is known only when the program runs."""


BINARY_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitOr: operator.or_,
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
    "abs": abs,
    "bool": bool,
    "dict": dict,
    "divmod": divmod,
    "float": float,
    "int": int,
    "len": len,
    "list": list,
    "max": max,
    "min": min,
    "range": lambda *ends: list(_require_short(range(*ends))),
    "set": set,
    "sorted": sorted,
    "str": str,
    "sum": sum,
    "tuple": tuple,
    "enumerate": lambda items: [list(pair) for pair in enumerate(items)],
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
    str: frozenset(
        (
            "lower",
            "upper",
            "strip",
            "startswith",
            "endswith",
            "replace",
            "split",
            "join",
            "removesuffix",
        )
    ),
    dict: frozenset(("get", "items", "keys", "values")),
    list: frozenset(("index", "count", "copy")),
}
"""Type -> its methods that change nothing."""
VIEW_METHODS = ("items", "keys", "values")
"""Methods of a mapping that return a view. Their result is a list here."""
PATH_FUNCTIONS: Mapping[str, Callable[..., str]] = {
    "os.path.join": os.path.join,
    "os.path.basename": os.path.basename,
    "os.path.dirname": os.path.dirname,
}


def evaluate_binary(kind: type[ast.operator], left: Value, right: Value) -> Value:
    """Return the result of an operator on two plain values.

    Raises:
        UnknownValue: A value is not plain, or the result would be large.
    """
    if kind not in BINARY_OPERATORS or not (is_plain(left) and is_plain(right)):
        raise UnknownValue
    if kind is ast.Pow and not _is_small_power(left, right):
        raise UnknownValue
    if kind is ast.Mult:
        _refuse_long_repetition(left, right)
    return _apply(BINARY_OPERATORS[kind], left, right)


def _is_small_power(base: Value, exponent: Value) -> bool:
    """Return whether a power has few digits."""
    return (
        isinstance(base, int | float)
        and abs(base) <= MAX_POWER_BASE
        and isinstance(exponent, int)
        and 0 <= exponent <= MAX_EXPONENT
    )


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
    """Return an item of a plain value.

    Raises:
        UnknownValue: The value has no such item, or is not plain.
    """
    if not isinstance(holder, dict | list | tuple | str) or not is_plain(index):
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
    if name == "extend" and isinstance(before, list) and isinstance(added, list | tuple):
        return [*before, *added]
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
        if (
            isinstance(left, ImportedName)
            and isinstance(right, ImportedName)
            and kind in (ast.Eq, ast.NotEq)
        ):
            return (left == right) is (kind is ast.Eq)
        raise UnknownValue
    return bool(_apply(COMPARISONS[kind], left, right))


def _is_same_object(left: Value, right: Value) -> bool:
    """Return whether `left is right` holds, for None, a bool or an object.

    Raises:
        UnknownValue: A value is open, or of another type, whose identity depends on the interpreter.
    """
    if is_open(left) or is_open(right):
        raise UnknownValue
    for value in (left, right):
        if value is None or isinstance(value, bool):
            return left is right
    if isinstance(left, Object) and isinstance(right, Object):
        return left is right
    raise UnknownValue


def call_builtin(name: str, arguments: Sequence[Value], options: Mapping[str, Value]) -> Value:
    """Return the result of a builtin function on plain values.

    Raises:
        UnknownValue: A value is not plain, or the function is not in the tables.
    """
    if name == "cast" and len(arguments) == 2:
        return arguments[1]
    if name == "isinstance" and len(arguments) == 2:
        return evaluate_isinstance(*arguments)
    function = BUILTINS.get(name) or PATH_FUNCTIONS.get(name)
    if function is None or options or not all(map(is_plain, arguments)):
        raise UnknownValue
    return _apply(function, *arguments)


def evaluate_isinstance(value: Value, kinds: Value) -> bool:
    """Return the answer of `isinstance`.

    Args:
        value: The value.
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
    result = _apply(getattr(holder, name), *arguments)
    if name in VIEW_METHODS and isinstance(result, Iterable):
        return [_make_list(item) for item in result]
    return result


def _make_list(item: Value) -> Value:
    """Return a tuple as a list, and any other value as it is."""
    if isinstance(item, tuple):
        return list(item)
    return item


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
