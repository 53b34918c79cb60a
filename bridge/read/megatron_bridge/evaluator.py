"""`Evaluator`: a function of a Python program, followed by its syntax, statement by statement.

    evaluator = Evaluator(library)
    container = evaluator.evaluate_function(function)    # an `Object`: fields, each with its statement

No program is imported or run. A function with source is followed at each of its calls. If the answer
of a condition is known only when the program runs, both branches are followed. A name or field that
differs after them has an open value, whose decider is the condition. A branch that raises an error
makes no run, so that only the other one counts.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from bridge.read.megatron_bridge.expressions import (
    ExpressionEvaluator,
    Frame,
    format_origin,
    make_open_value,
)
from bridge.read.megatron_bridge.modelled_calls import Call
from bridge.read.megatron_bridge.operations import add_elements
from bridge.read.megatron_bridge.source_library import Library
from bridge.read.megatron_bridge.values import Function, Object, Value, is_plain, is_same
from bridge.read.text.python_calls import format_source

MAX_DEPTH = 16
"""Most functions that are followed inside one another."""
MAX_STATEMENTS = 20000
"""Most statements that are followed for one run. Each condition may double them."""
TOO_LONG = "a function with too many branches to be followed"
MAX_LOOP_ITERATIONS = 512
"""Most iterations of a loop that is followed."""
ENDING_STATEMENTS = (ast.Return, ast.Raise, ast.Break, ast.Continue)
"""Statements after which the next one of a block is not reached."""


@dataclass(frozen=True, slots=True)
class Returned:
    """The end of a function, with its value."""

    value: Value


class Raised:
    """The end of a path that raises an error."""


class Jumped:
    """The end of a block by a `break` or a `continue`."""


Outcome = Returned | Raised | Jumped | None
"""The end of a block; None if the statement after it is next."""


class Evaluator(ExpressionEvaluator):
    """A program while one of its functions is followed."""

    def __init__(self, library: Library) -> None:
        super().__init__(library)
        self._depth = 0
        """Number of functions that are being followed."""
        self._statement_count = 0
        """Number of statements that were followed."""
        self.refused_arguments: dict[str, None] = {}
        """Keyword arguments that a followed function does not take.

        Python raises an error for such a call, which is followed here without the argument."""

    @property
    def is_exhausted(self) -> bool:
        """Whether the program has too many branches, so that nothing is known of its values."""
        return self._statement_count >= MAX_STATEMENTS

    # -- functions ---------------------------------------------------------------------------------

    def evaluate_function(
        self, function: Function, arguments: Mapping[str, Value] | None = None
    ) -> Value:
        """Return the value that a function returns.

        Args:
            function: The function.
            arguments: Name of a parameter -> its argument. Other parameters have their defaults.
        """
        return self._evaluate_body(function, [], arguments or {})

    def follow(self, function: Function, call: Call) -> Value:
        """Return the value that a call of a function returns."""
        return self._evaluate_body(function, call.arguments, call.options)

    def _evaluate_body(
        self, function: Function, arguments: Sequence[Value], options: Mapping[str, Value]
    ) -> Value:
        """Return the value that a function returns for positional and keyword arguments.

        It is open if the function raises an error, or lies too deep.
        """
        name = function.node.name
        if self._depth >= MAX_DEPTH:
            return Object(decider=f"the function {name}, which is too deep to be followed")
        names = self._bind_parameters(function, arguments, options)
        frame = Frame(function.module, names, function.closure)
        self._depth += 1
        outcome = self._evaluate_block(function.node.body, frame)
        self._depth -= 1
        if isinstance(outcome, Returned):
            return outcome.value
        if isinstance(outcome, Raised):
            return Object(decider=f"the function {name}, which raises an error,")
        return None

    def _bind_parameters(
        self, function: Function, arguments: Sequence[Value], options: Mapping[str, Value]
    ) -> dict[str, Value]:
        """Return the value of each parameter: its argument, its default, or an open value."""
        signature = function.node.args
        positional = [*signature.posonlyargs, *signature.args]
        names: dict[str, Value] = {}
        for parameter in (*positional, *signature.kwonlyargs):
            decider = f"the argument {parameter.arg} of {function.node.name}"
            names[parameter.arg] = Object(decider=decider)
        frame = Frame(function.module, closure=function.closure)
        for parameter, expression in collect_defaults(signature):
            names[parameter.arg] = self.value(expression, frame)
        for parameter, value in zip(positional, arguments, strict=False):
            names[parameter.arg] = value
        other_options: dict[str, Value] = {}
        for name, value in options.items():
            if name in names:
                names[name] = value
            else:
                other_options[name] = value
        if signature.kwarg is None:
            self.refused_arguments.update(dict.fromkeys(other_options))
        if signature.vararg is not None:
            names[signature.vararg.arg] = list(arguments[len(positional) :])
        if signature.kwarg is not None:
            names[signature.kwarg.arg] = other_options
        return names

    # -- statements --------------------------------------------------------------------------------

    def _evaluate_block(self, statements: Sequence[ast.stmt], frame: Frame) -> Outcome:
        """Follow statements, and return their end.

        If a branch of an open condition may end the block, the statements after it are followed for
        each branch. Otherwise both branches are joined, and the block goes on.
        """
        for index, statement in enumerate(statements):
            self._statement_count += 1
            if self.is_exhausted:
                return Returned(Object(decider=TOO_LONG))
            if isinstance(statement, ast.If) and self._forks_block(statement, frame):
                return self._evaluate_both_branches(statement, statements[index + 1 :], frame)
            outcome = self._evaluate_statement(statement, frame)
            if outcome is not None:
                return outcome
        return None

    def _evaluate_statement(self, node: ast.stmt, frame: Frame) -> Outcome:
        """Follow a statement, and return its end.

        A statement that has no case changes no name and no field.
        """
        match node:
            case ast.Return(value=None):
                return Returned(None)
            case ast.Return(value=ast.expr() as expression):
                return Returned(self.value(expression, frame))
            case ast.Raise():
                return Raised()
            case ast.Break() | ast.Continue():
                return Jumped()
            case ast.If():
                return self._evaluate_if(node, frame)
            case ast.For():
                return self._evaluate_loop(node, frame)
            case ast.With(body=body):
                return self._evaluate_block(body, frame)
            case ast.Try():
                return self._evaluate_try(node, frame)
        self._evaluate_simple_statement(node, frame)
        return None

    def _evaluate_simple_statement(self, node: ast.stmt, frame: Frame) -> None:  # noqa: PLR0912  a case for each form
        """Follow a statement after which the next one of the block is reached.

        The blocks of `while` and `match` are followed once, and everything that they set is open.
        """
        match node:
            case ast.While():
                self._open_changes(node.body, frame, make_open_value(node.test).decider)
            case ast.Match(subject=subject, cases=cases):
                for case in cases:
                    self._open_changes(case.body, frame, make_open_value(subject).decider)
            case ast.Assign(targets=targets, value=expression):
                value = self.value(expression, frame)
                for target in targets:
                    self._assign(target, value, frame)
            case ast.AnnAssign(target=target, value=ast.expr() as expression):
                self._assign(target, self.value(expression, frame), frame)
            case ast.AugAssign(target=target):
                self._assign(target, self.value(_build_sum(node), frame), frame)
            case ast.Delete(targets=targets):
                for target in targets:
                    self._assign(target, make_open_value(target), frame)
            case ast.Expr(value=expression):
                self._evaluate_expression_statement(expression, frame)
            case ast.Import() | ast.ImportFrom():
                for name, path in frame.module.imports_of(node).items():
                    imported = self.constant(self.library.find(path))
                    self.journal.put(frame.names, name, imported)
            case ast.FunctionDef(name=name):
                inner = Function(module=frame.module, node=node, closure=frame.visible)
                self.journal.put(frame.names, name, inner)

    def _evaluate_expression_statement(self, expression: ast.expr, frame: Frame) -> None:
        """Follow an expression whose value is not used. A list or a mapping may grow by it."""
        match expression:
            case ast.Call(
                func=ast.Attribute(value=holder, attr="append" | "extend" | "update" as name),
                args=[argument],
            ):
                before = self.value(holder, frame)
                if isinstance(before, list | dict):
                    after = add_elements(before, name, self.value(argument, frame))
                    self._assign(holder, after, frame)
                    return
        self.value(expression, frame)

    def _evaluate_try(self, node: ast.Try, frame: Frame) -> Outcome:
        """Follow a `try` statement.

        If its body raises an error, the first handler is followed. Else the body may still raise one
        when the program runs. So a handler that sets a name or a field, or returns, is a second
        branch.
        """
        body = [*node.body, *node.orelse]
        outcome, changes = self.journal.follow_branch(partial(self._evaluate_block, body, frame))
        if not node.handlers:
            self.journal.repeat(changes)
        elif isinstance(outcome, Raised):
            outcome = self._evaluate_block(node.handlers[0].body, frame)
        else:
            handler_outcome, handler_changes = self.journal.follow_branch(
                partial(self._evaluate_block, node.handlers[0].body, frame)
            )
            has_effect = bool(handler_changes) or isinstance(handler_outcome, Returned)
            if isinstance(handler_outcome, Raised) or not has_effect:
                self.journal.repeat(changes)
            else:
                decider = f"`try: {format_source(node.body[0])}`"
                self.journal.join(changes, handler_changes, decider)
                outcome = _join_outcomes(outcome, handler_outcome, decider)
        return self._evaluate_block(node.finalbody, frame) or outcome

    def _evaluate_loop(self, node: ast.For, frame: Frame) -> Outcome:
        """Follow a loop over known items, one iteration after the other.

        Everything that any other loop sets is open.
        """
        items = self._get_loop_items(node, frame)
        if items is None:
            decider = make_open_value(node.iter).decider
            self._open_changes(node.body, frame, decider, target=node.target)
            return None
        for item in items:
            self._assign(node.target, item, frame)
            outcome = self._evaluate_block(node.body, frame)
            if outcome is not None:
                return outcome
        return self._evaluate_block(node.orelse, frame)

    def _get_loop_items(self, node: ast.For, frame: Frame) -> Sequence[Value] | None:
        """Return the items of a loop; None if they are not known, are too many, or the loop may end early."""
        items = self.value(node.iter, frame)
        if isinstance(items, dict):
            items = list(items)
        if not isinstance(items, list | tuple) or len(items) > MAX_LOOP_ITERATIONS:
            return None
        if _has_jumps(node):
            return None
        return items

    def _open_changes(
        self,
        statements: Sequence[ast.stmt],
        frame: Frame,
        decider: str,
        *,
        target: ast.expr | None = None,
    ) -> None:
        """Follow statements that run an unknown number of times. Everything that they set is open.

        Args:
            statements: The statements.
            frame: The names of the function.
            decider: The source that decides how often they run.
            target: The name of the loop.
        """
        if target is not None:
            self._assign(target, Object(decider=decider), frame)
        _, changes = self.journal.follow_branch(partial(self._evaluate_block, statements, frame))
        self.journal.join(changes, {}, decider)

    # -- branches ----------------------------------------------------------------------------------

    def _evaluate_if(self, node: ast.If, frame: Frame) -> Outcome:
        """Follow the branch of a condition that is taken, or both branches of an open condition."""
        answer = self.answer(node.test, frame)
        if answer is True:
            return self._evaluate_block(node.body, frame)
        if answer is False:
            return self._evaluate_block(node.orelse, frame)
        return self._evaluate_both_branches(node, (), frame)

    def _forks_block(self, node: ast.If, frame: Frame) -> bool:
        """Return whether a condition is open, and one of its branches may end the block."""
        return _may_end(node) and self.answer(node.test, frame) is None

    def _evaluate_both_branches(
        self, node: ast.If, statements_after: Sequence[ast.stmt], frame: Frame
    ) -> Outcome:
        """Follow both branches of an open condition, and join them.

        Args:
            node: The condition.
            statements_after: The statements after it, if a branch may end the block. They are
                followed for each branch.
            frame: The names of the function.
        """
        body_outcome, body_changes = self.journal.follow_branch(
            partial(self._evaluate_block, [*node.body, *statements_after], frame)
        )
        else_outcome, else_changes = self.journal.follow_branch(
            partial(self._evaluate_block, [*node.orelse, *statements_after], frame)
        )
        if isinstance(body_outcome, Raised):
            self.journal.repeat(else_changes)
            return else_outcome
        if isinstance(else_outcome, Raised):
            self.journal.repeat(body_changes)
            return body_outcome
        decider = make_open_value(node.test).decider
        self.journal.join(body_changes, else_changes, decider)
        return _join_outcomes(body_outcome, else_outcome, decider)

    # -- assignments -------------------------------------------------------------------------------

    def _evaluate_call(self, node: ast.Call, frame: Frame) -> Value:
        """Return the result of a call. `pop` of a mapping takes the item out of it."""
        match node:
            case ast.Call(func=ast.Attribute(value=target, attr="pop"), args=[key_node, *others]):
                holder = self.value(target, frame)
                key = self.value(key_node, frame)
                if isinstance(holder, dict) and isinstance(key, str):
                    rest = {name: value for name, value in holder.items() if name != key}
                    self._assign(target, rest, frame)
                    if key in holder:
                        return holder[key]
                    if others:
                        return self.value(others[0], frame)
        return super()._evaluate_call(node, frame)

    def _assign(self, target: ast.expr, value: Value, frame: Frame) -> None:
        """Assign a value to a name, a field, an item, or several of them."""
        match target:
            case ast.Name(id=name):
                self.journal.put(frame.names, name, value)
            case ast.Attribute(value=inner, attr=name):
                holder = self.value(inner, frame)
                if isinstance(holder, Object):
                    self.state(holder, name, value, format_origin(frame, target))
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for position, element in enumerate(targets):
                    self._assign(element, _get_element(value, position, element), frame)
            case ast.Subscript(value=inner, slice=index):
                holder = self.value(inner, frame)
                key = self.value(index, frame)
                if isinstance(holder, dict) and is_plain(key):
                    self._assign(inner, {**holder, key: value}, frame)
                elif isinstance(holder, Object) and isinstance(key, str):
                    self.state(holder, key, value, format_origin(frame, target))


def collect_defaults(signature: ast.arguments) -> list[tuple[ast.arg, ast.expr]]:
    """Return the parameters with a default, each with the expression of the default."""
    positional = [*signature.posonlyargs, *signature.args]
    with_default = positional[len(positional) - len(signature.defaults) :]
    defaults = list(zip(with_default, signature.defaults, strict=True))
    for parameter, expression in zip(signature.kwonlyargs, signature.kw_defaults, strict=True):
        if expression is not None:
            defaults.append((parameter, expression))
    return defaults


def _join_outcomes(first: Outcome, second: Outcome, decider: str) -> Outcome:
    """Return the end of two branches of which the program takes one.

    If only one of them returns, the function may return its value or go on. The value is open then.
    """
    if first is None and second is None:
        return None
    first_value = _get_returned_value(first)
    second_value = _get_returned_value(second)
    if is_same(first_value, second_value):
        return Returned(first_value)
    return Returned(Object(decider=decider))


def _get_returned_value(outcome: Outcome) -> Value:
    """Return the value of a branch that returns; None for any other end."""
    if isinstance(outcome, Returned):
        return outcome.value
    return None


def _may_end(node: ast.If) -> bool:
    """Return whether a branch of a condition may end the block: it returns, raises or jumps."""
    for statement in (*node.body, *node.orelse):
        for inner in ast.walk(statement):
            if isinstance(inner, ENDING_STATEMENTS):
                return True
    return False


def _has_jumps(node: ast.For) -> bool:
    """Return whether a loop has a `break` or a `continue`."""
    return any(isinstance(inner, ast.Break | ast.Continue) for inner in ast.walk(node))


def _get_element(value: Value, index: int, target: ast.expr) -> Value:
    """Return the element of a value that is unpacked into several targets."""
    if isinstance(value, tuple | list) and index < len(value):
        return value[index]
    if isinstance(value, Object) and value.decider:
        return Object(decider=value.decider)
    return make_open_value(target)


def _build_sum(node: ast.AugAssign) -> ast.expr:
    """Return the expression that an assignment such as `+=` assigns."""
    target = ast.parse(format_source(node.target), mode="eval").body
    return ast.copy_location(ast.BinOp(left=target, op=node.op, right=node.value), node)
