"""Values of a Python program that is followed by its syntax: plain values, objects, functions, classes and names.

A number, a text, None, a list, a tuple, a set and a mapping of such are themselves.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bridge.read.megatron_bridge.source_library import Module


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldValue:
    """The value of a field, and the statement that sets it."""

    value: Value
    origin: str
    """`FILE:LINE, cfg.model.seq_length`; empty: no statement sets it."""
    earlier_unknown_functions: int = 0
    """Strangers that had the object before the statement, and cannot change what it sets."""


@dataclass(eq=False, kw_only=True, slots=True)
class Object:
    """An object, or a value that only the run knows."""

    kind: str = ""
    """Import path of its class; empty: not known."""
    decider: str = ""
    """What decides the fields that no statement sets, as a noun; empty: the defaults of the class."""
    recipe: str = ""
    """Name of the registered recipe that it begins with."""
    fields: dict[str, FieldValue] = field(default_factory=dict)
    unknown_functions: list[str] = field(default_factory=list)
    """Functions that get the object, may change it, and are not at hand."""

    @property
    def is_known(self) -> bool:
        """Whether its class is known, so that it is no text and no number."""
        return bool(self.kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """A function whose source is at hand."""

    module: Module
    node: ast.FunctionDef
    closure: Mapping[str, Value] = field(default_factory=dict)
    """Names of the function around it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Class:
    """A class whose source is at hand."""

    module: Module
    node: ast.ClassDef

    @property
    def path(self) -> str:
        """Its import path."""
        return f"{self.module.name}.{self.node.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """A name that the top level of a module assigns."""

    module: Module
    name: str


@dataclass(frozen=True, slots=True)
class ImportedName:
    """A module, function, class or constant whose source is not followed, by its import path."""

    path: str

    @property
    def last(self) -> str:
        """The word behind the last dot."""
        return self.path.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Method:
    """An attribute of a value that is about to be called."""

    holder: Value
    name: str


Value = Any
"""One of the classes above, or a plain value."""
PLAIN_TYPES = (str, int, float, bool, type(None), list, tuple, dict, set)


def is_plain(value: Value) -> bool:
    """Return whether a value is a plain one, with all that it holds."""
    if isinstance(value, dict):
        return all(is_plain(item) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple | set):
        return all(is_plain(item) for item in value)
    return isinstance(value, PLAIN_TYPES)


def is_open(value: Value) -> bool:
    """Return whether only the run knows a value."""
    return isinstance(value, Object) and not value.is_known


def is_same(first: Value, second: Value) -> bool:
    """Return whether two values are one object, or equal."""
    if first is second:
        return True
    if isinstance(first, Object) or isinstance(second, Object):
        return False
    return type(first) is type(second) and bool(first == second)


def evaluate_truth(value: Value) -> bool | None:
    """Return whether a value counts as true in a condition; None where only the run knows it."""
    if is_open(value):
        return None
    if isinstance(value, PLAIN_TYPES):
        return bool(value)
    if isinstance(value, ImportedName):
        return None
    return True
