"""`ExpressionEvaluator`: the values of a program's expressions, by their syntax.

A function whose source is found is followed by its subclass `Evaluator`. An expression whose value
is known only when the program runs has an open value, whose decider is the text of the expression.

These expressions are followed:

    64, "adam", None, name, cfg.model.num_layers
    [a, b], (a, b), {a, b}, {key: value, **mapping}
    [f(x) for x in items], {f(x) for x in items}     one loop over known items, with one name
    a + b, -a, not a, a and b, a or b, a < b, a in b, a is None
    a if test else b, mapping[key], lambda x: value
    f(a, name=b, **mapping)      a function or class with source, a modelled call (`modelled_calls.py`),
                                 a builtin function or a method in the tables of `operations.py`,
                                 `getattr`, `typing.cast`
    Name(field=value)            a class without source: an object with these fields

Any other expression is open: f-strings, items and slices of lists, `**` as an operator, chained
comparisons, generators, comprehensions with conditions, `:=`, `await`, and calls with `*`. A function
without source, or with a decorator, may change the objects that it gets.
"""

from __future__ import annotations

import ast
import builtins
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bridge.read.megatron_bridge import operations
from bridge.read.megatron_bridge.classes import collect_declared_fields, find_method
from bridge.read.megatron_bridge.journal import ABSENT, Journal, Namespace
from bridge.read.megatron_bridge.modelled_calls import (
    CHECKPOINT_MODEL_DEFAULTS,
    CONVERTER_CLASS,
    NOT_MODELLED,
    TEXT_MODEL_METHOD,
    Call,
    Starts,
    evaluate_modelled_call,
    is_checkpoint_model,
)
from bridge.read.megatron_bridge.operations import UnknownValue
from bridge.read.megatron_bridge.source_library import PACKAGE, Library, Module
from bridge.read.megatron_bridge.values import (
    LATE_CLAUSE,
    Class,
    Constant,
    FieldValue,
    Function,
    ImportedName,
    Method,
    Object,
    Value,
    evaluate_truth,
)
from bridge.read.run_keys import PRECISION_KEY
from bridge.read.text.python_calls import format_source

CHANGING_FUNCTIONS = ("setattr", "delattr")
"""Builtin functions that change an object."""
HARMLESS_PACKAGE = "dataclasses."
"""Package whose functions do not change an object."""
START_PACKAGE = f"{PACKAGE}.training."
"""Package whose functions do not change a container before the run starts."""


@dataclass(slots=True)
class Frame:
    """The names that a function sees while it is followed."""

    module: Module
    names: Namespace = field(default_factory=dict)
    """Local names of the function."""
    closure: Mapping[str, Value] = field(default_factory=dict)
    """Names of the function around it."""
    early_returns: dict[str, Value] = field(default_factory=dict)
    """Decider of statements that may run -> the value that they return."""

    @property
    def visible(self) -> dict[str, Value]:
        """The names that a function inside this one sees, besides those of the module."""
        return {**self.closure, **self.names}


class ExpressionEvaluator(ABC):
    """The expressions of a program."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.journal = Journal()
        """The changes of the branches that are being followed."""
        self.starts = Starts()
        """The containers with which the program starts a run."""
        self.repeated_arguments: dict[str, None] = {}
        """Keyword arguments that a call states itself and has in a mapping after `**` too.

        Python raises an error for such a call, which is followed here with the value of the mapping."""

    @abstractmethod
    def follow(self, function: Function, call: Call) -> Value:
        """Return the value that a call of a function with source returns. The subclass follows it."""

    def value(self, node: ast.expr, frame: Frame) -> Value:
        """Return the value of an expression. It is open if it is known only when the program runs."""
        try:
            return self._evaluate_node(node, frame)
        except (UnknownValue, RecursionError):
            return make_open_value(node)

    def answer(self, test: ast.expr, frame: Frame) -> bool | None:
        """Return the answer of a condition; None if it is known only when the program runs."""
        return evaluate_truth(self.value(test, frame))

    def defaults(self, kind: str) -> dict[str, Value]:
        """Return the defaults of the fields that a class and its bases declare.

        Args:
            kind: Import path of the class. A class without source has no known default.
        """
        defaults: dict[str, Value] = {}
        for name, declared in collect_declared_fields(self.library, kind).items():
            expression = declared.node.value
            if expression is not None:
                defaults[name] = self._evaluate_declaration(expression, Frame(declared.module))
        return defaults

    def state(self, holder: Object, name: str, value: Value, origin: str) -> None:
        """Write a field of an object.

        Args:
            name: Name of the field.
            origin: The statement that sets it; empty if none does.
        """
        earlier_functions = 0
        if origin:
            earlier_functions = len(holder.unknown_functions)
        stated = FieldValue(value=value, origin=origin, earlier_unknown_functions=earlier_functions)
        self.journal.put(holder.fields, name, stated)

    def _evaluate_node(self, node: ast.expr, frame: Frame) -> Value:  # noqa: PLR0912  a case for each form
        """Return the value of an expression.

        Raises:
            UnknownValue: The value is known only when the program runs, or the form is not read.
        """
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._resolve_name(name, frame)
            case ast.Attribute(value=inner, attr=name):
                return self._get_attribute(self.value(inner, frame), name)
            case ast.Call():
                return self._evaluate_call(node, frame)
            case ast.List(elts=items):
                return self._evaluate_items(items, frame)
            case ast.Tuple(elts=items):
                return tuple(self._evaluate_items(items, frame))
            case ast.Set(elts=items):
                return set(_require_plain(self._evaluate_items(items, frame)))
            case ast.Dict():
                return self._evaluate_mapping(node, frame)
            case ast.BinOp(left=left, op=kind, right=right):
                values = (self.value(left, frame), self.value(right, frame))
                return operations.evaluate_binary(type(kind), *values)
            case ast.UnaryOp(op=kind, operand=operand):
                return operations.evaluate_unary(kind, self.value(operand, frame))
            case ast.BoolOp():
                return self._evaluate_and_or(node, frame)
            case ast.Compare(left=left, ops=[kind], comparators=[right]):
                values = (self.value(left, frame), self.value(right, frame))
                return operations.evaluate_comparison(type(kind), *values)
            case ast.IfExp():
                return self._evaluate_conditional(node, frame)
            case ast.Subscript(value=inner, slice=index):
                return operations.get_item(self.value(inner, frame), self.value(index, frame))
            case ast.ListComp(elt=element, generators=[ast.comprehension(ifs=[]) as loop]):
                return self._evaluate_comprehension(element, loop, frame)
            case ast.SetComp(elt=element, generators=[ast.comprehension(ifs=[]) as loop]):
                return set(_require_plain(self._evaluate_comprehension(element, loop, frame)))
            case ast.Lambda():
                return Function(module=frame.module, node=_name_lambda(node), closure=frame.visible)
        raise UnknownValue

    # -- names and attributes ----------------------------------------------------------------------

    def _resolve_name(self, name: str, frame: Frame) -> Value:
        """Return the value of a name: a local one, a builtin function, or a name of the module."""
        for names in (frame.names, frame.closure):
            if name in names:
                return names[name]
        if hasattr(builtins, name) and not frame.module.binds(name):
            return ImportedName(name)
        return self.constant(self.library.resolve_name(frame.module, name))

    def constant(self, resolved: Value) -> Value:
        """Return the value of a constant of a module, and any other value as it is.

        A name that is assigned twice, or also imported, has an open value.
        """
        if not isinstance(resolved, Constant):
            return resolved
        module = resolved.module
        if resolved.name not in module.values:
            expressions = module.assigned[resolved.name]
            is_certain = len(expressions) == 1 and resolved.name not in module.imported
            # Written first, so that an expression which reads the constant itself ends.
            module.values[resolved.name] = Object(decider=f"{resolved.name} of {module.file}")
            if is_certain:
                module.values[resolved.name] = self.value(expressions[0], Frame(module))
        return module.values[resolved.name]

    def _get_attribute(self, holder: Value, name: str) -> Value:
        """Return an attribute of a value.

        That of an object is the field that is set, the default of its class, or a method.
        """
        if isinstance(holder, ImportedName):
            return self.constant(self.library.find(f"{holder.path}.{name}"))
        if isinstance(holder, Class):
            return ImportedName(f"{holder.path}.{name}")
        if not isinstance(holder, Object):
            return Method(holder, name)
        return self._get_object_attribute(holder, name)

    def _get_object_attribute(self, holder: Object, name: str) -> Value:
        """Return an attribute of an object. An unknown one becomes a field with an open value."""
        if name in holder.fields:
            return holder.fields[name].value
        if is_checkpoint_model(holder) and name in CHECKPOINT_MODEL_DEFAULTS:
            return CHECKPOINT_MODEL_DEFAULTS[name]
        default = self._get_default(holder.kind, name)
        if default is not ABSENT:
            if isinstance(default, Object):  # kept, since a later statement may write into it
                self.state(holder, name, default, "")
            return default
        is_method = name == TEXT_MODEL_METHOD or holder.kind == CONVERTER_CLASS
        if is_method or find_method(self.library, holder.kind, name) is not None:
            return Method(holder, name)
        decider = holder.decider or f"the default of {holder.kind.rpartition('.')[2]}"
        unknown = Object(decider=decider)
        self.state(holder, name, unknown, "")
        return unknown

    def _get_default(self, kind: str, name: str) -> Value:
        """Return the default of a field of a class; `ABSENT` if no source states one."""
        declared = collect_declared_fields(self.library, kind).get(name)
        if declared is None or declared.node.value is None:
            return ABSENT
        return self._evaluate_declaration(declared.node.value, Frame(declared.module))

    def _evaluate_declaration(self, expression: ast.expr, frame: Frame) -> Value:
        """Return the default in the declaration of a dataclass field: a value, or a call of `field`."""
        if not isinstance(expression, ast.Call) or format_source(expression.func) != "field":
            return self.value(expression, frame)
        for keyword in expression.keywords:
            if keyword.arg == "default_factory":
                factory_call = ast.Call(func=keyword.value, args=[], keywords=[])
                return self.value(ast.copy_location(factory_call, expression), frame)
        return make_open_value(expression)

    # -- lists, mappings, conditions ---------------------------------------------------------------

    def _evaluate_items(self, nodes: Sequence[ast.expr], frame: Frame) -> list[Value]:
        """Return the items of a list or a tuple.

        Raises:
            UnknownValue: An item has a `*`.
        """
        if _has_star(nodes):
            raise UnknownValue
        return [self.value(node, frame) for node in nodes]

    def _evaluate_mapping(self, node: ast.Dict, frame: Frame) -> dict[Value, Value]:
        """Return the value of a mapping.

        Raises:
            UnknownValue: A key, or the mapping after a `**`, is not known.
        """
        mapping: dict[Value, Value] = {}
        for key_node, value_node in zip(node.keys, node.values, strict=True):
            value = self.value(value_node, frame)
            if key_node is not None:
                key = self.value(key_node, frame)
                if not isinstance(key, str | int | tuple):
                    raise UnknownValue
                mapping[key] = value
            elif isinstance(value, dict):
                mapping.update(value)
            else:
                raise UnknownValue
        return mapping

    def _evaluate_and_or(self, node: ast.BoolOp, frame: Frame) -> Value:
        """Return the value of `and` or `or`.

        It is that of the first operand that decides the answer. If an open operand stands before it,
        only its truth is known.

        Raises:
            UnknownValue: An operand is open, and no other one decides the answer.
        """
        is_and = isinstance(node.op, ast.And)
        has_open = False
        value: Value = is_and
        for part in node.values:
            value = self.value(part, frame)
            answer = evaluate_truth(value)
            if answer is None:
                has_open = True
            elif answer is not is_and and has_open:
                return not is_and
            elif answer is not is_and:
                return value
        if has_open:
            raise UnknownValue
        return value

    def _evaluate_conditional(self, node: ast.IfExp, frame: Frame) -> Value:
        """Return the value of `a if test else b`, which is open if the answer of the test is."""
        answer = self.answer(node.test, frame)
        if answer is True:
            return self.value(node.body, frame)
        if answer is False:
            return self.value(node.orelse, frame)
        return make_open_value(node.test)

    def _evaluate_comprehension(
        self, element: ast.expr, loop: ast.comprehension, frame: Frame
    ) -> list[Value]:
        """Return the elements of a comprehension with one loop and one name.

        Raises:
            UnknownValue: The items are not known, or the loop has several names.
        """
        items = self.value(loop.iter, frame)
        if not isinstance(items, list | tuple | str) or not isinstance(loop.target, ast.Name):
            raise UnknownValue
        elements: list[Value] = []
        for item in items:
            names = {**frame.names, loop.target.id: item}
            elements.append(self.value(element, Frame(frame.module, names, frame.closure)))
        return elements

    # -- calls -------------------------------------------------------------------------------------

    def _evaluate_call(self, node: ast.Call, frame: Frame) -> Value:
        """Return the result of a call.

        A method with source is followed first, then the modelled calls count, and then any other
        function or class with source. At last the function has no source. A function that gets `*`
        arguments, or has a decorator, counts as one without source.
        """
        call = Call(
            node=node,
            called=self.value(node.func, frame),
            options=self._evaluate_keywords(node.keywords, frame),
            arguments=[self._evaluate_argument(argument, frame) for argument in node.args],
            origin=format_origin(frame, node),
        )
        if _has_star(node.args):
            return self._evaluate_function_without_source(call)
        method_call = self._bind_method(call)
        if method_call is not None:
            return self.follow(*method_call)
        result = evaluate_modelled_call(call, self.starts)
        if result is not NOT_MODELLED:
            return result
        match call.called:
            case Function(node=function) if not function.decorator_list:
                return self.follow(call.called, call)
            case Class():
                return self._construct_object(call)
            case Method(holder=holder, name=name) if not isinstance(holder, Object):
                return operations.call_method(holder, name, call.arguments, call.options)
        return self._evaluate_function_without_source(call)

    def _evaluate_argument(self, node: ast.expr, frame: Frame) -> Value:
        """Return the value of a positional argument, and that of the list after a `*`."""
        if isinstance(node, ast.Starred):
            return self.value(node.value, frame)
        return self.value(node, frame)

    def _evaluate_keywords(self, keywords: Sequence[ast.keyword], frame: Frame) -> dict[str, Value]:
        """Return the keyword arguments of a call. Those after a `**` that are not known are named "**"."""
        options: dict[str, Value] = {}
        for keyword in keywords:
            value = self.value(keyword.value, frame)
            if keyword.arg is not None:
                options[keyword.arg] = value
            elif isinstance(value, dict):
                self.repeated_arguments.update(dict.fromkeys(options.keys() & value.keys()))
                options.update({str(name): inner for name, inner in value.items()})
            else:
                options["**"] = value
        return options

    def _bind_method(self, call: Call) -> tuple[Function, Call] | None:
        """Return the function of a called method, and its call with the object as the first argument.

        It is None for another call, and for a method without source or with a decorator, which may
        change its arguments.
        """
        method = call.called
        if not isinstance(method, Method) or not isinstance(method.holder, Object):
            return None
        function = find_method(self.library, method.holder.kind, method.name)
        if function is None or function.node.decorator_list:
            return None
        arguments = [method.holder, *call.arguments]
        bound = Call(
            node=call.node,
            called=function,
            arguments=arguments,
            options=call.options,
            origin=call.origin,
        )
        return function, bound

    def _construct_object(self, call: Call) -> Object:
        """Return an object of a class with source, whose fields are the arguments."""
        fields: dict[str, FieldValue] = {}
        names = collect_declared_fields(self.library, call.path)
        for name, value in zip(names, call.arguments, strict=False):
            fields[name] = FieldValue(value=value, origin=call.origin)
        return Object(kind=call.path, fields={**fields, **call.stated})

    def _evaluate_function_without_source(self, call: Call) -> Value:
        """Return the result of a function without source.

        A function of Python is applied. A name in capitals is a class, by convention. Any other
        function may change the objects that it gets, and its result is open.
        """
        path = call.path
        name = path.rpartition(".")[2]
        if path == "getattr" and len(call.arguments) >= 2:
            return self._evaluate_getattr(call)
        if name == "cast" and len(call.arguments) == 2:
            return call.arguments[1]
        if hasattr(builtins, path) and path not in CHANGING_FUNCTIONS:
            return operations.call_builtin(path, call.arguments, call.options)
        if isinstance(call.called, ImportedName) and name[:1].isupper():
            return Object(kind=path, fields=call.stated)
        for value in (*call.arguments, *call.options.values()):
            if isinstance(value, Object) and not _is_harmless(path, value):
                value.unknown_functions.append(name or format_source(call.node.func))
        decider = f"`{format_source(call.node)}`"
        if path.startswith(PACKAGE) and isinstance(call.called, ImportedName):
            module = path.rpartition(".")[0]
            decider += f" of {module}, whose source is not at hand,"
        return Object(decider=decider)

    def _evaluate_getattr(self, call: Call) -> Value:
        """Return the result of `getattr`.

        Raises:
            UnknownValue: The object or the name is not known.
        """
        holder, name, *_ = call.arguments
        if not isinstance(holder, Object) or not isinstance(name, str):
            raise UnknownValue
        return self._get_attribute(holder, name)


def _is_harmless(path: str, value: Object) -> bool:
    """Return whether a function without source does not change an object."""
    if PRECISION_KEY in value.fields and path.startswith(START_PACKAGE):
        return True
    return path.startswith(HARMLESS_PACKAGE)


def make_open_value(node: ast.AST) -> Object:
    """Return the open value of an expression."""
    return Object(decider=f"`{format_source(node)}`{LATE_CLAUSE}")


def format_origin(frame: Frame, node: ast.expr) -> str:
    """Return the place of a statement: "deepseek_v3.py:142, cfg.model.seq_length".

    A call is named by its function.
    """
    named_node = node
    if isinstance(node, ast.Call):
        named_node = node.func
    return f"{frame.module.file}:{node.lineno}, {format_source(named_node)}"


def _has_star(nodes: Sequence[ast.expr]) -> bool:
    """Return whether an item or an argument has a `*`."""
    return any(isinstance(node, ast.Starred) for node in nodes)


def _require_plain(items: list[Value]) -> list[Value]:
    """Return items that a set can hold.

    Raises:
        UnknownValue: An item is no text, no number and not None.
    """
    if not all(isinstance(item, str | int | float | None) for item in items):
        raise UnknownValue
    return items


def _name_lambda(node: ast.Lambda) -> ast.FunctionDef:
    """Return a lambda as a function definition with the name "lambda"."""
    body = ast.Return(value=node.body)
    function = ast.FunctionDef(name="lambda", args=node.args, body=[body], decorator_list=[])
    return ast.fix_missing_locations(ast.copy_location(function, node))
