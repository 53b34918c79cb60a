"""What Python's operators, builtins and methods make of plain values, in a program that is followed by its syntax."""

from __future__ import annotations

import ast
import operator
import os.path
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
"""Elements of a list, and digits of a number, that an operation may make."""


class UnknownValue(Exception):  # noqa: N818  it is no fault: only the run knows the value
    """Only the run knows what an operation makes."""


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
"""Type -> the methods that change nothing."""
PATH_FUNCTIONS: Mapping[str, Callable[..., str]] = {
    "os.path.join": os.path.join,
    "os.path.basename": os.path.basename,
    "os.path.dirname": os.path.dirname,
}


def evaluate_binary(kind: type[ast.operator], left: Value, right: Value) -> Value:
    """Return what an operator makes of two plain values; Unknown for others."""
    if kind not in BINARY_OPERATORS or not (is_plain(left) and is_plain(right)):
        raise UnknownValue
    if kind is ast.Pow and not _is_small_power(left, right):
        raise UnknownValue
    if kind is ast.Mult:
        _refuse_long_repetition(left, right)
    return _apply(BINARY_OPERATORS[kind], left, right)


def _is_small_power(left: Value, right: Value) -> bool:
    return (
        isinstance(left, int | float)
        and abs(left) <= 10
        and isinstance(right, int)
        and 0 <= right <= 64
    )


def _refuse_long_repetition(left: Value, right: Value) -> None:
    """Raise Unknown for a list or a text that is repeated too often."""
    for items, times in ((left, right), (right, left)):
        if (
            isinstance(items, Sequence)
            and isinstance(times, int)
            and len(items) * times > MAX_RESULT_SIZE
        ):
            raise UnknownValue


def evaluate_unary(kind: ast.unaryop, operand: Value) -> Value:
    """Return what `not` or a minus makes of a value; Unknown where only the run knows it."""
    if isinstance(kind, ast.Not):
        answer = evaluate_truth(operand)
        if answer is None:
            raise UnknownValue
        return not answer
    if isinstance(kind, ast.USub) and isinstance(operand, int | float):
        return -operand
    raise UnknownValue


def get_item(holder: Value, index: Value) -> Value:
    """Return an item of a plain value; Unknown where there is none."""
    if not isinstance(holder, dict | list | tuple | str) or not is_plain(index):
        raise UnknownValue
    return _apply(operator.getitem, holder, index)


def add_elements(before: Value, name: str, added: Value) -> Value:
    """Return a list or a mapping with what `append`, `extend` or `update` adds."""
    if name == "append" and isinstance(before, list):
        return [*before, added]
    if name == "extend" and isinstance(before, list) and isinstance(added, list | tuple):
        return [*before, *added]
    if name == "update" and isinstance(before, dict) and isinstance(added, dict):
        return {**before, **added}
    return Object(decider=f"`{name}` with what only the run knows,")


def evaluate_comparison(kind: type[ast.cmpop], left: Value, right: Value) -> bool:
    """Return the answer of a comparison; Unknown where only the run knows it."""
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
    """Return whether `left is right` holds, for None, a switch or an object; Unknown for others."""
    if is_open(left) or is_open(right):
        raise UnknownValue
    for value in (left, right):
        if value is None or isinstance(value, bool):
            return left is right
    if isinstance(left, Object) and isinstance(right, Object):
        return left is right
    raise UnknownValue


def call_builtin(name: str, arguments: Sequence[Value], options: Mapping[str, Value]) -> Value:
    """Return what a builtin function makes of plain values; Unknown for others."""
    if name == "cast" and len(arguments) == 2:
        return arguments[1]
    if name == "isinstance" and len(arguments) == 2:
        return evaluate_isinstance(*arguments)
    known = BUILTINS.get(name) or PATH_FUNCTIONS.get(name)
    if known is None or options or not all(map(is_plain, arguments)):
        raise UnknownValue
    return _apply(known, *arguments)


def evaluate_isinstance(value: Value, kinds: Value) -> bool:
    """Return the answer of `isinstance`; Unknown where only the run knows it."""
    if is_open(value):
        raise UnknownValue
    if not isinstance(kinds, tuple):
        kinds = (kinds,)
    answers: list[bool] = []
    for kind in kinds:
        answers.append(_is_instance(value, kind))
    return any(answers)


def _is_instance(value: Value, kind: Value) -> bool:
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
    """Return what a method of a plain value makes; Unknown for a method that changes it, and for others."""
    is_known = name in PURE_METHODS.get(type(holder), ())
    if not is_known or not is_plain(holder) or not all(map(is_plain, arguments)) or options:
        raise UnknownValue
    made = _apply(getattr(holder, name), *arguments)
    if name in ("items", "keys", "values"):
        return [list(item) if isinstance(item, tuple) else item for item in made]
    return made


def _require_short(items: range) -> range:
    if len(items) > MAX_RESULT_SIZE:
        raise UnknownValue
    return items


def _apply(function: Callable[..., Any], *arguments: Value) -> Value:
    """Return what a function makes; Unknown where it refuses its arguments."""
    try:
        return function(*arguments)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError):
        raise UnknownValue from None
