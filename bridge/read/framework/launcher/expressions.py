"""`ExpressionReader`: the values of the expressions of a Python launcher, by their syntax.

Its subclass `LauncherProgram` follows statements and functions. An expression without a case, or with
a part that only the run knows, has a value that only the run knows.
"""

from __future__ import annotations

import ast
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from bridge.read.framework.launcher.syntax import format_expression
from bridge.read.framework.launcher.values import (
    Class,
    Frame,
    Imported,
    Instance,
    Module,
    UnknownValueError,
    Value,
    get_plain,
    join_texts,
    make_open_value,
    wrap,
)

MAX_ITEMS = 4096
"""Items of a list, and characters of a repeated text, that are computed."""
MAX_NUMBER = 2**63
"""The largest number that is computed."""
OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitOr: operator.or_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
BUILTINS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        abs,
        all,
        any,
        bool,
        dict,
        float,
        int,
        len,
        list,
        max,
        min,
        round,
        set,
        str,
        sum,
        tuple,
    )
} | {"enumerate": lambda items: list(enumerate(items)), "sorted": sorted}
TEXT_METHODS = frozenset(
    [
        "endswith",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "title",
        "upper",
    ]
)
"""Methods of a text that are computed."""
EQUALITIES = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
FAULTS = (
    *(UnknownValueError, TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError),
)
"""Errors of an expression whose value is then not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenCondition:
    """A condition that the launcher does not decide, as it was followed."""

    text: str
    """The condition as it is written, with its line."""
    source: str
    """The condition as it is written."""
    holds: bool
    """Its answer with nothing overridden."""
    names: frozenset[str]
    """Variables on whose defaults its answer rests; none if only the run knows it."""
    constants: tuple[object, ...]
    """Constants that it is compared with for equality."""
    is_assertion: bool
    """Whether the launcher ends with an error if it does not hold."""


class ExpressionReader(ABC):
    """The expressions of a program.

    Args:
        variables: Variables of the environment and options of the command line that are stated.
        forced: Conditions as they are written that hold, though the launcher does not decide them.
    """

    def __init__(self, variables: Mapping[str, str], forced: Iterable[str] = ()) -> None:
        self.variables = dict(variables)
        self.forced = frozenset(forced)
        self.defaults: dict[str, object] = {}
        """Name of a variable that nothing states -> its default."""
        self.choices: dict[str, tuple[object, ...]] = {}
        """Name of an option -> the values that its type lists."""
        self.conditions: dict[str, OpenCondition] = {}
        """Text of a condition -> the condition, in the order of the program."""

    @abstractmethod
    def call(self, node: ast.Call, frame: Frame) -> Value:
        """Return the value that a call returns. The subclass follows it."""

    @abstractmethod
    def load_name(self, path: str) -> Value:
        """Return what an import path names. The subclass finds it."""

    def value(self, node: ast.expr, frame: Frame) -> Value:
        """Return the value of an expression."""
        try:
            return self._evaluate(node, frame)
        except FAULTS:
            return make_open_value(node)

    def plain(self, node: ast.expr, frame: Frame, names: set[str]) -> Any:
        """Return the value of an expression as Python has it, and add the variables that it rests on."""
        return get_plain(self.value(node, frame), names)

    def holds(self, test: ast.expr, frame: Frame, *, is_assertion: bool = False) -> bool:
        """Return whether a condition holds. A condition that only the run knows does not hold."""
        answer = self.value(test, frame)
        names: set[str] = set()
        is_late = bool(answer.late_name)
        does_hold = bool(answer.content)
        if isinstance(answer.content, str):
            try:
                does_hold = bool(get_plain(answer, names))
            except UnknownValueError:
                is_late = True
        names |= answer.names
        does_hold = does_hold and not is_late
        text = f"line {test.lineno}, {format_expression(test)}"
        if (is_late or names) and text not in self.conditions:
            self.conditions[text] = OpenCondition(
                text=text,
                source=format_expression(test),
                holds=does_hold,
                names=frozenset(names),
                constants=_list_compared_constants(test),
                is_assertion=is_assertion,
            )
        return does_hold != (text in self.forced)

    def read_variable(self, name: str, default: Value | None, *, kind: str = "str") -> Value:
        """Return a variable of the environment, or an option of the command line.

        Args:
            default: Its value where nothing states it; None: the run states it.
            kind: The type of an option as the launcher has it.
        """
        if name in self.variables:
            return Value(_parse_stated(self.variables[name], kind))
        if default is None:
            return make_open_value(name)
        names: set[str] = set()
        try:
            content = get_plain(default, names)
        except UnknownValueError:
            return make_open_value(name)
        if content is not None and not isinstance(content, str | int | float):
            return default
        self.defaults.setdefault(name, content)
        if kind.startswith("Literal"):
            self.choices[name] = _list_choices(kind)
        return Value(content, frozenset(names | {name}))

    # -- expressions -------------------------------------------------------------------------------

    def _evaluate(self, node: ast.expr, frame: Frame) -> Value:  # noqa: PLR0912  a case for each form
        """Return the value of an expression.

        Raises:
            UnknownValueError: Only the run knows it, or the expression has no case.
        """
        match node:
            case ast.Constant(value=content):
                return Value(content)
            case ast.Name(id=name):
                return self._find_name(name, frame)
            case ast.Attribute():
                return self._get_attribute(node, frame)
            case ast.JoinedStr(values=parts):
                return join_texts(self.value(part, frame) for part in parts)
            case ast.FormattedValue(value=inner, conversion=-1, format_spec=None):
                return self.value(inner, frame)
            case ast.BinOp():
                return self._evaluate_operation(node, frame)
            case ast.BoolOp():
                return self._evaluate_bool(node, frame)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                names: set[str] = set()
                return Value(not self.plain(operand, frame, names), frozenset(names))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                names = set()
                return Value(-self.plain(operand, frame, names), frozenset(names))
            case ast.Compare():
                return self._compare(node, frame)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.value(body if self.holds(test, frame) else orelse, frame)
            case ast.Call():
                return self.call(node, frame)
            case ast.Subscript(value=holder, slice=index):
                return self._get_item(self.value(holder, frame), index, frame)
            case ast.Dict():
                return self._build_mapping(node, frame)
            case ast.List(elts=elements):
                return Value(list(self._list_elements(elements, frame)))
            case ast.Tuple(elts=elements) | ast.Set(elts=elements):
                return Value(tuple(self._list_elements(elements, frame)))
            case ast.GeneratorExp(elt=element) | ast.ListComp(elt=element):
                frames = self._iterate_frames(node.generators, frame)
                return Value([self.value(element, each) for each in frames])
            case ast.DictComp(key=key, value=element):
                mapping: dict[object, Value] = {}
                for each in self._iterate_frames(node.generators, frame):
                    mapping[self.plain(key, each, set())] = self.value(element, each)
                return Value(mapping)
            case ast.NamedExpr(target=target, value=inner):
                value = self.value(inner, frame)
                frame.names[target.id] = value
                return value
        raise UnknownValueError(format_expression(node))

    def _find_name(self, name: str, frame: Frame) -> Value:
        value = frame.find(name)
        if value is None:
            return make_open_value(name)
        if isinstance(value.content, Imported):
            return self.load_name(value.content.path)
        return value

    def _get_attribute(self, node: ast.Attribute, frame: Frame) -> Value:
        """Return an attribute of an instance, a class or a module."""
        holder = self.value(node.value, frame)
        match holder.content:
            case Imported(path=path):
                return self.load_name(f"{path}.{node.attr}")
            case Instance(fields=fields, kind=kind):
                if node.attr in fields:
                    return fields[node.attr]
                return self.find_member(kind, node.attr, holder)
            case Class() as kind:
                return self.find_member(kind, node.attr, None)
            case str() if node.attr == "name":  # the path of a temporary file
                return holder
            case Module(name=name):
                return self.load_name(f"{name}.{node.attr}")
        raise UnknownValueError(node.attr)

    @abstractmethod
    def find_member(self, kind: Class, name: str, holder: Value | None) -> Value:
        """Return a member of a class. The subclass finds it."""

    def _evaluate_operation(self, node: ast.BinOp, frame: Frame) -> Value:
        """Return a sum, a product or a similar value. A text may have pieces that only the run knows."""
        left, right = self.value(node.left, frame), self.value(node.right, frame)
        if isinstance(node.op, ast.Add):
            if isinstance(left.content, str) or isinstance(right.content, str):
                return join_texts((left, right))
            if isinstance(left.content, list) and isinstance(right.content, list):
                return Value(self.list_items(left) + self.list_items(right))
        if isinstance(left.content, dict) and isinstance(right.content, dict):
            return Value(left.content | right.content)
        names: set[str] = set()
        first, second = get_plain(left, names), get_plain(right, names)
        if isinstance(node.op, ast.Mult) and _get_size(first, second) > MAX_ITEMS:
            raise UnknownValueError("a large product")
        result = OPERATORS[type(node.op)](first, second)
        if isinstance(result, int | float) and abs(result) > MAX_NUMBER:
            raise UnknownValueError("a large number")
        return wrap(result, names)

    def _evaluate_bool(self, node: ast.BoolOp, frame: Frame) -> Value:
        """Return the operand of `and` or `or` that decides it."""
        is_or = isinstance(node.op, ast.Or)
        names: set[str] = set()
        late: Value | None = None
        value = Value()
        for operand in node.values:
            value = self.value(operand, frame)
            if value.late_name:
                late = value
                continue
            names |= value.names
            if bool(value.content) == is_or:
                break
        else:
            if late is not None:
                return make_open_value(node)
        if late is not None and not isinstance(value.content, bool):
            return make_open_value(node)
        return Value(value.content, value.names | names)

    def _compare(self, node: ast.Compare, frame: Frame) -> Value:
        """Return the answer of a comparison."""
        names: set[str] = set()
        left = self.value(node.left, frame)
        for kind, expression in zip(node.ops, node.comparators, strict=True):
            right = self.value(expression, frame)
            is_known_object = isinstance(left.content, Instance | re.Match) and right == Value()
            if is_known_object:
                return Value(isinstance(kind, ast.IsNot | ast.NotEq))
            second = get_plain(right, names)
            if not OPERATORS[type(kind)](get_plain(left, names), second):
                return Value(False, frozenset(names))
            left = right
        return Value(True, frozenset(names))

    def _get_item(self, holder: Value, index: ast.expr, frame: Frame) -> Value:
        """Return an element of a list or a mapping."""
        if isinstance(index, ast.Slice):
            raise UnknownValueError("a slice")
        names = set(holder.names)
        if holder.content == Imported("os.environ"):
            return self.read_variable(str(self.plain(index, frame, names)), None)
        item = holder.content[self.plain(index, frame, names)]  # type: ignore[index]
        if not isinstance(item, Value):
            item = Value(item)
        if item.late_name:
            return item
        return Value(item.content, item.names | names)

    def _build_mapping(self, node: ast.Dict, frame: Frame) -> Value:
        """Return a mapping; a key has to be known."""
        mapping: dict[object, Value] = {}
        for key, expression in zip(node.keys, node.values, strict=True):
            value = self.value(expression, frame)
            if key is not None:
                mapping[self.plain(key, frame, set())] = value
            elif isinstance(value.content, dict):
                mapping |= value.content
            else:
                raise UnknownValueError(format_expression(expression))
        return Value(mapping)

    def _list_elements(self, elements: Iterable[ast.expr], frame: Frame) -> Iterator[Value]:
        for element in elements:
            if isinstance(element, ast.Starred):
                yield from self.list_items(self.value(element.value, frame))
            else:
                yield self.value(element, frame)

    def _iterate_frames(
        self, generators: Sequence[ast.comprehension], frame: Frame
    ) -> Iterator[Frame]:
        """Yield the names that the element of a comprehension sees, once for each known item."""
        if not generators:
            yield frame
            return
        generator, *rest = generators
        inner = Frame(frame.module, outer=frame)
        for item in self.list_items(self.value(generator.iter, frame)):
            self.assign(generator.target, item, inner)
            if all(self.holds(test, inner) for test in generator.ifs):
                yield from self._iterate_frames(rest, inner)

    def list_items(self, value: Value) -> list[Value]:
        """Return the items of a known list, tuple, range or mapping.

        Raises:
            UnknownValueError: Only the run knows them, or there are too many.
        """
        content = value.content
        if not isinstance(content, list | tuple | dict | range) or len(content) > MAX_ITEMS:
            raise UnknownValueError("items")
        items: list[Value] = []
        for item in content:
            items.append(item if isinstance(item, Value) else Value(item, value.names))
        return items

    @abstractmethod
    def assign(self, target: ast.expr, value: Value, frame: Frame) -> None:
        """Assign a value. The subclass does."""


@lru_cache(maxsize=4_096)
def _list_compared_constants(test: ast.expr) -> tuple[object, ...]:
    """Return the constants that a condition compares something with for equality, each once."""
    constants: list[object] = []
    for node in ast.walk(test):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], EQUALITIES):
            constants += _list_constants(node)
    return tuple(dict.fromkeys(constants))


def _list_constants(test: ast.AST) -> tuple[object, ...]:
    """Return the constants of a condition or a type, each once."""
    constants = [node.value for node in ast.walk(test) if isinstance(node, ast.Constant)]
    return tuple(dict.fromkeys(constants))


@lru_cache(maxsize=1024)
def _list_choices(kind: str) -> tuple[object, ...]:
    """Return the values that the type of an option lists: "Literal['a', 'b']"."""
    return _list_constants(ast.parse(kind))


def _get_size(first: object, second: object) -> int:
    """Return the length of the product of a text or a list and a number; 0 for two numbers."""
    for items, factor in ((first, second), (second, first)):
        if isinstance(items, str | list | tuple) and isinstance(factor, int):
            return len(items) * factor
    return 0


def _parse_stated(text: str, kind: str) -> object:
    """Return the text of a variable as a value of the option's type."""
    if "bool" in kind:
        return text.lower() in ("1", "true", "yes", "on", "t", "y")
    for name, parse in (("int", int), ("float", float)):
        if name in kind:
            try:
                return parse(text)
            except ValueError:
                continue
    return text
