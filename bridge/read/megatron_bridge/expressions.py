"""`ExpressionEvaluator`: the values of a program's expressions, by their syntax.

Calls of functions are left to the evaluator.

An expression whose value only the run knows is open, with its text as what decides it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bridge.read.megatron_bridge import operations
from bridge.read.megatron_bridge.classes import collect_declared_fields, find_method
from bridge.read.megatron_bridge.journal import ABSENT, Journal, Namespace
from bridge.read.megatron_bridge.modelled_calls import (
    CHECKPOINT_MODEL_DEFAULTS,
    CONVERTER_CLASS,
    MODEL_METHODS,
    NOT_MODELLED,
    Call,
    Starts,
    evaluate_modelled_call,
    is_checkpoint_model,
)
from bridge.read.megatron_bridge.operations import UnknownValue
from bridge.read.megatron_bridge.source_library import PACKAGE, Library, Module
from bridge.read.megatron_bridge.values import (
    Class,
    Constant,
    FieldValue,
    Function,
    ImportedName,
    Method,
    Object,
    Value,
    evaluate_truth,
    is_same,
)
from bridge.read.run_keys import PRECISION_KEY
from bridge.read.text.python_calls import format_source

ATTRIBUTE_FUNCTIONS = ("hasattr", "getattr", "setattr")
"""Builtin functions that take the name of an attribute."""
PYTHON_FUNCTIONS = frozenset(
    (*operations.BUILTINS, *operations.BUILTIN_TYPES, *ATTRIBUTE_FUNCTIONS, "isinstance", "print")
)
HARMLESS_PACKAGES = (
    *("argparse", "dataclasses", "logger", "logging", "os", "print", "sys", "time", "torch"),
    *("warnings", "megatron.bridge.utils"),
)
"""Packages whose functions leave a config as it is."""
START_PACKAGES = (f"{PACKAGE}.training.", "megatron.core.")
"""Packages whose functions leave a container as it is until the run starts."""


@dataclass(slots=True)
class Frame:
    """A function while it is followed."""

    module: Module
    names: Namespace = field(default_factory=dict)
    closure: Mapping[str, Value] = field(default_factory=dict)
    """Names of the function around it."""

    @property
    def visible(self) -> dict[str, Value]:
        """The names that a function inside it sees."""
        return {**self.closure, **self.names}


class ExpressionEvaluator:
    """The expressions of a program."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.journal = Journal()
        self.starts = Starts()

    def follow(self, function: Function, call: Call) -> Value:
        """Return what a call of a function returns whose source is at hand."""
        raise NotImplementedError

    def value(self, node: ast.expr, frame: Frame) -> Value:
        """Return the value of an expression, an open one where only the run knows it."""
        try:
            return self._evaluate_node(node, frame)
        except (UnknownValue, RecursionError):
            return make_open_value(node)

    def answer(self, test: ast.expr, frame: Frame) -> bool | None:
        """Return the answer of a condition; None where only the run knows it."""
        return evaluate_truth(self.value(test, frame))

    def defaults(self, kind: str) -> dict[str, Value]:
        """Return the defaults that the source of a class and of its bases states."""
        defaults: dict[str, Value] = {}
        for name, declared in collect_declared_fields(self.library, kind).items():
            if declared.node.value is not None:
                defaults[name] = self._evaluate_declaration(
                    declared.node.value, Frame(declared.module)
                )
        return defaults

    def state(self, holder: Object, name: str, value: Value, origin: str) -> None:
        """Write a field of an object; `origin` is empty where no statement sets it."""
        earlier = 0
        if origin:
            earlier = len(holder.unknown_functions)
        stated = FieldValue(value=value, origin=origin, earlier_unknown_functions=earlier)
        self.journal.put(holder.fields, name, stated)

    def _evaluate_node(self, node: ast.expr, frame: Frame) -> Value:  # noqa: PLR0912  a case for each form
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
                return self._joined(node, frame)
            case ast.Compare(left=left, ops=[kind], comparators=[right]):
                values = (self.value(left, frame), self.value(right, frame))
                return operations.evaluate_comparison(type(kind), *values)
            case ast.IfExp():
                return self._chosen(node, frame)
            case ast.Subscript(value=inner, slice=index):
                return operations.get_item(self.value(inner, frame), self.value(index, frame))
            case ast.JoinedStr(values=parts):
                return self._evaluate_f_string(parts, frame)
            case ast.ListComp(elt=element, generators=[ast.comprehension(ifs=[]) as rounds]):
                return self._evaluate_comprehension(element, rounds, frame)
            case ast.SetComp(elt=element, generators=[ast.comprehension(ifs=[]) as rounds]):
                return set(_require_plain(self._evaluate_comprehension(element, rounds, frame)))
            case ast.Lambda():
                return Function(module=frame.module, node=_name_lambda(node), closure=frame.visible)
        raise UnknownValue

    # -- names and attributes ----------------------------------------------------------------------

    def _resolve_name(self, name: str, frame: Frame) -> Value:
        """Return what a name stands for."""
        for names in (frame.names, frame.closure):
            if name in names:
                return names[name]
        if name in PYTHON_FUNCTIONS and not frame.module.binds(name):
            return ImportedName(name)
        return self.constant(self.library.resolve_name(frame.module, name))

    def constant(self, resolved: Value) -> Value:
        """Return the value of a constant of a module; any other value is itself."""
        if not isinstance(resolved, Constant):
            return resolved
        module = resolved.module
        if resolved.name not in module.values:
            expressions = module.assigned[resolved.name]
            is_certain = len(expressions) == 1 and resolved.name not in module.imported
            module.values[resolved.name] = Object(decider=f"{resolved.name} of {module.file}")
            if is_certain:
                module.values[resolved.name] = self.value(expressions[0], Frame(module))
        return module.values[resolved.name]

    def _get_attribute(self, holder: Value, name: str) -> Value:
        """Return an attribute of a value."""
        if isinstance(holder, ImportedName):
            return self.constant(self.library.find(f"{holder.path}.{name}"))
        if isinstance(holder, Class):
            return ImportedName(f"{holder.path}.{name}")
        if not isinstance(holder, Object):
            return Method(holder, name)
        if name in holder.fields:
            return holder.fields[name].value
        if is_checkpoint_model(holder) and name in CHECKPOINT_MODEL_DEFAULTS:
            return CHECKPOINT_MODEL_DEFAULTS[name]
        default = self._get_default(holder.kind, name)
        if default is not ABSENT:
            if isinstance(default, Object):  # a later statement writes into the same object
                self.state(holder, name, default, "")
            return default
        is_method = name in MODEL_METHODS or holder.kind == CONVERTER_CLASS
        if is_method or find_method(self.library, holder.kind, name) is not None:
            return Method(holder, name)
        decider = holder.decider or f"the default of {holder.kind.rpartition('.')[2]}"
        unknown = Object(decider=decider)
        self.state(holder, name, unknown, "")
        return unknown

    def _get_default(self, kind: str, name: str) -> Value:
        """Return the default of a field of a class; ABSENT where no source at hand states one."""
        declared = collect_declared_fields(self.library, kind).get(name)
        if declared is None or declared.node.value is None:
            return ABSENT
        return self._evaluate_declaration(declared.node.value, Frame(declared.module))

    def _evaluate_declaration(self, expression: ast.expr, frame: Frame) -> Value:
        """Return the default that the declaration of a dataclass states."""
        if not isinstance(expression, ast.Call) or format_source(expression.func) != "field":
            return self.value(expression, frame)
        for keyword in expression.keywords:
            if keyword.arg == "default":
                return self.value(keyword.value, frame)
            if keyword.arg == "default_factory":
                made = ast.Call(func=keyword.value, args=[], keywords=[])
                return self.value(ast.copy_location(made, expression), frame)
        return make_open_value(expression)

    # -- lists, mappings, conditions ---------------------------------------------------------------

    def _evaluate_items(self, nodes: Sequence[ast.expr], frame: Frame) -> list[Value]:
        items: list[Value] = []
        for node in nodes:
            if not isinstance(node, ast.Starred):
                items.append(self.value(node, frame))
                continue
            inner = self.value(node.value, frame)
            if not isinstance(inner, list | tuple):
                raise UnknownValue
            items.extend(inner)
        return items

    def _evaluate_mapping(self, node: ast.Dict, frame: Frame) -> dict[Value, Value]:
        made: dict[Value, Value] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            inner = self.value(value, frame)
            if key is not None:
                name = self.value(key, frame)
                if not isinstance(name, str | int | tuple):
                    raise UnknownValue
                made[name] = inner
            elif isinstance(inner, dict):
                made.update(inner)
            else:
                raise UnknownValue
        return made

    def _joined(self, node: ast.BoolOp, frame: Frame) -> Value:
        """Return the value of `and` or `or`; the part that decides it ends it."""
        is_and = isinstance(node.op, ast.And)
        has_open = False
        value: Value = is_and
        for part in node.values:
            value = self.value(part, frame)
            answer = evaluate_truth(value)
            if answer is None:
                has_open = True
            elif answer is not is_and:
                return not is_and if has_open else value
        if has_open:
            raise UnknownValue
        return value

    def _chosen(self, node: ast.IfExp, frame: Frame) -> Value:
        answer = self.answer(node.test, frame)
        if answer is True:
            return self.value(node.body, frame)
        if answer is False:
            return self.value(node.orelse, frame)
        body = self.value(node.body, frame)
        if is_same(body, self.value(node.orelse, frame)):
            return body
        return make_open_value(node.test)

    def _evaluate_f_string(self, parts: Sequence[ast.expr], frame: Frame) -> str:
        text: list[str] = []
        for part in parts:
            inner = part.value if isinstance(part, ast.FormattedValue) else part
            value = self.value(inner, frame)
            if not isinstance(value, str | int | float | bool):
                raise UnknownValue
            text.append(str(value))
        return "".join(text)

    def _evaluate_comprehension(
        self, element: ast.expr, rounds: ast.comprehension, frame: Frame
    ) -> list[Value]:
        items = self.value(rounds.iter, frame)
        if not isinstance(items, list | tuple | str) or not isinstance(rounds.target, ast.Name):
            raise UnknownValue
        made: list[Value] = []
        for item in items:
            names = {**frame.names, rounds.target.id: item}
            made.append(self.value(element, Frame(frame.module, names, frame.closure)))
        return made

    # -- calls -------------------------------------------------------------------------------------

    def _evaluate_call(self, node: ast.Call, frame: Frame) -> Value:
        """Return what a call makes."""
        options: dict[str, Value] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value, frame)
            if keyword.arg is not None:
                options[keyword.arg] = value
            elif isinstance(value, dict):
                options.update({str(name): inner for name, inner in value.items()})
            else:
                options["**"] = value
        call = Call(
            node=node,
            called=self.value(node.func, frame),
            arguments=self._evaluate_items(node.args, frame),
            options=options,
            origin=format_origin(frame, node),
        )
        followed = self._find_followed_method(call)
        if followed is not None:
            return self.follow(*followed)
        known = evaluate_modelled_call(call, self.starts)
        if known is not NOT_MODELLED:
            return known
        match call.called:
            case Function():
                return self.follow(call.called, call)
            case Class():
                return self._construct_object(call)
            case Method(holder=holder, name=name) if not isinstance(holder, Object):
                return operations.call_method(holder, name, call.arguments, call.options)
        return self._evaluate_unknown_function(call)

    def _find_followed_method(self, call: Call) -> tuple[Function, Call] | None:
        """Return a method whose source is at hand, with its object as the first argument."""
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
        """Return an object of a class whose source is at hand."""
        fields: dict[str, FieldValue] = {}
        names = collect_declared_fields(self.library, call.path)
        for name, value in zip(names, call.arguments, strict=False):
            fields[name] = FieldValue(value=value, origin=call.origin)
        return Object(kind=call.path, fields={**fields, **call.stated})

    def _evaluate_unknown_function(self, call: Call) -> Value:
        """Return what a function makes whose source is not at hand.

        It may change the objects that it gets.
        """
        path = call.path
        last = path.rpartition(".")[2]
        if path in ATTRIBUTE_FUNCTIONS and len(call.arguments) >= 2:
            return self._evaluate_attribute_function(call)
        if last == "deepcopy" and call.arguments:
            return call.arguments[0]
        if path in PYTHON_FUNCTIONS or path in operations.PATH_FUNCTIONS or last == "cast":
            name = last if last == "cast" else path
            return operations.call_builtin(name, call.arguments, call.options)
        if isinstance(call.called, ImportedName) and last[:1].isupper():
            return Object(kind=path, fields=call.stated)
        for value in (*call.arguments, *call.options.values()):
            if isinstance(value, Object) and not _is_harmless(path, value):
                value.unknown_functions.append(last or format_source(call.node.func))
        where = ""
        if path.startswith(PACKAGE):
            where = f" of {path.rpartition('.')[0]}, whose source is not at hand,"
        return Object(decider=f"`{format_source(call.node)}`{where}")

    def _evaluate_attribute_function(self, call: Call) -> Value:
        """Return what `hasattr` and `getattr` answer; `setattr` writes a field."""
        holder, name, *others = call.arguments
        if not isinstance(holder, Object) or not isinstance(name, str):
            raise UnknownValue
        if call.path == "setattr" and others:
            self.state(holder, name, others[0], call.origin)
            return None
        if call.path == "getattr":
            return self._get_attribute(holder, name)
        is_stated = name in holder.fields and bool(holder.fields[name].origin)
        is_declared = name in collect_declared_fields(self.library, holder.kind)
        if (
            is_stated
            or is_declared
            or (is_checkpoint_model(holder) and name in CHECKPOINT_MODEL_DEFAULTS)
        ):
            return True
        raise UnknownValue


def _is_harmless(path: str, value: Object) -> bool:
    """Return whether a function whose source is not at hand leaves an object as it is."""
    if PRECISION_KEY in value.fields and path.startswith(START_PACKAGES):
        return True
    return path.startswith(HARMLESS_PACKAGES)


def make_open_value(node: ast.AST) -> Object:
    """Return the open value of an expression."""
    return Object(decider=f"`{format_source(node)}`, which only the run knows,")


def format_origin(frame: Frame, node: ast.expr) -> str:
    """Return where a statement stands: "deepseek_v3.py:142, cfg.model.seq_length"."""
    text = format_source(node.func if isinstance(node, ast.Call) else node)
    return f"{frame.module.file}:{node.lineno}, {text}"


def _require_plain(items: list[Value]) -> list[Value]:
    """Return items that are plain values, which a set may hold; Unknown for others."""
    if not all(isinstance(item, str | int | float | None) for item in items):
        raise UnknownValue
    return items


def _name_lambda(node: ast.Lambda) -> ast.FunctionDef:
    """Return a lambda as a function with a name."""
    body = ast.Return(value=node.body)
    made = ast.FunctionDef(name="lambda", args=node.args, body=[body], decorator_list=[])
    return ast.fix_missing_locations(ast.copy_location(made, node))
