"""`Value`: a value of a Python program that is followed by its syntax.

A value is a plain one, or an object, function, class or name of this module. A plain value is a
number, a text, None, or a list, tuple, set or mapping of values, and is represented by itself.

An *open* value is one that is known only when the program runs. It is an `Object` without a class.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bridge.read.megatron_bridge.source_library import Module

LATE_CLAUSE = ", which only the run knows,"
"""End of the name of a decider that is an expression."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldValue:
    """The value of a field, and the statement that sets it."""

    value: Value
    origin: str
    """The statement, as `FILE:LINE, cfg.model.seq_length`; empty if no statement sets the field."""
    earlier_unknown_functions: int = 0
    """Number of the functions in `Object.unknown_functions` that got the object before the statement.

    They cannot change the value that the statement sets."""


@dataclass(eq=False, kw_only=True, slots=True)
class Object:
    """An object of the program, or an open value.

    Two objects are equal only if they are one object, as in a program that changes them.
    """

    kind: str = ""
    """Import path of its class; empty for an open value."""
    decider: str = ""
    """The source that decides the fields which no statement sets, for messages.

    It is empty if the defaults of the class decide them."""
    recipe: str = ""
    """Name of the registered recipe that a precision starts from; empty for other objects."""
    fields: dict[str, FieldValue] = field(default_factory=dict)
    """Fields that are set, or that were read from the class or its defaults."""
    unknown_functions: list[str] = field(default_factory=list)
    """Functions without source that get the object and may change it, in their order."""

    @property
    def is_known(self) -> bool:
        """Whether its class is known, so that it is no text and no number."""
        return bool(self.kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """A function whose source is found."""

    module: Module
    node: ast.FunctionDef
    closure: Mapping[str, Value] = field(default_factory=dict)
    """Names of the function around it."""

    @property
    def path(self) -> str:
        """Its import path."""
        return f"{self.module.name}.{self.node.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Class:
    """A class whose source is found."""

    module: Module
    node: ast.ClassDef

    @property
    def path(self) -> str:
        """Its import path."""
        return f"{self.module.name}.{self.node.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """A name that the top level of a module assigns. Its expressions are not evaluated yet."""

    module: Module
    name: str


@dataclass(frozen=True, slots=True)
class ImportedName:
    """A module, function, class or constant without source, by its import path."""

    path: str

    @property
    def last(self) -> str:
        """The word after the last dot."""
        return self.path.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Method:
    """An attribute of a value that the program calls."""

    holder: Value
    name: str


Value = object
"""A plain value, or one of the classes above. `isinstance` and `match` tell them apart."""
PLAIN_TYPES = (str, int, float, bool, type(None), list, tuple, dict, set)


def is_plain(value: Value) -> bool:
    """Return whether a value is a plain one, with every value inside it."""
    if isinstance(value, dict):
        return all(is_plain(item) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple | set):
        return all(is_plain(item) for item in value)
    return isinstance(value, PLAIN_TYPES)


def is_open(value: Value) -> TypeGuard[Object]:
    """Return whether a value is known only when the program runs."""
    return isinstance(value, Object) and not value.is_known


def strip_late_clause(decider: str) -> str:
    """Return the name of a decider without `LATE_CLAUSE`."""
    return decider.removesuffix(LATE_CLAUSE)


def is_same(first: Value, second: Value) -> bool:
    """Return whether two values are one object, or equal values of one type."""
    if first is second:
        return True
    if isinstance(first, Object) or isinstance(second, Object):
        return False
    return type(first) is type(second) and bool(first == second)


def evaluate_truth(value: Value) -> bool | None:
    """Return whether a value counts as true in a condition; None for an open value and a name."""
    if is_open(value):
        return None
    if isinstance(value, PLAIN_TYPES):
        return bool(value)
    if isinstance(value, ImportedName):
        return None
    return True
