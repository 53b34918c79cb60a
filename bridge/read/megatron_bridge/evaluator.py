"""`Evaluator`: a function of a Python program, followed by its syntax, statement by statement.

    evaluator = Evaluator(library)
    container = evaluator.returned(function)       # an `Object`: fields, each with its statement

Nothing is imported or run. A function whose source is at hand is followed where it is called. Where
only the run knows the answer of a condition, both branches are followed; what differs behind them
is open, with the condition as what decides it. A branch that raises is no run.
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
"""Of functions that call one another."""
MAX_STATEMENTS = 20000
"""That are followed for one run; each condition may double them."""
TOO_LONG = "a function with too many branches to be followed"
MAX_LOOP_ITERATIONS = 512
"""Of a loop."""
ENDING_STATEMENTS = (ast.Return, ast.Raise, ast.Break, ast.Continue)


@dataclass(frozen=True, slots=True)
class Returned:
    """The end of a function, with its value."""

    value: Value


class Raised:
    """The end of a path that raises an error."""


class Jumped:
    """A `break` or a `continue`."""


Outcome = Returned | Raised | Jumped | None
"""How a block ends; None: the statement behind it is next."""


class Evaluator(ExpressionEvaluator):
    """A program while one of its functions is followed."""

    def __init__(self, library: Library) -> None:
        super().__init__(library)
        self._depth = 0
        self._statements = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether the program has too many branches, so that nothing is known of its values."""
        return self._statements >= MAX_STATEMENTS

    # -- functions ---------------------------------------------------------------------------------

    def evaluate_function(
        self, function: Function, arguments: Mapping[str, Value] | None = None
    ) -> Value:
        """Return what a function returns; a parameter without an argument has its default."""
        return self._evaluate_body(function, [], arguments or {})

    def follow(self, function: Function, call: Call) -> Value:
        """Return what a call of a function returns."""
        return self._evaluate_body(function, call.arguments, call.options)

    def _evaluate_body(
        self, function: Function, arguments: Sequence[Value], options: Mapping[str, Value]
    ) -> Value:
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
        """Return the values of the parameters: the argument, the default, or an open value."""
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
        others: dict[str, Value] = {}
        for name, value in options.items():
            if name in names:
                names[name] = value
            else:
                others[name] = value
        if signature.vararg is not None:
            names[signature.vararg.arg] = list(arguments[len(positional) :])
        if signature.kwarg is not None:
            names[signature.kwarg.arg] = others
        return names

    # -- statements --------------------------------------------------------------------------------

    def _evaluate_block(self, statements: Sequence[ast.stmt], frame: Frame) -> Outcome:
        """Follow statements, and return how they end."""
        for index, statement in enumerate(statements):
            self._statements += 1
            if self.is_exhausted:
                return Returned(Object(decider=TOO_LONG))
            if isinstance(statement, ast.If) and self._forks_the_end(statement, frame):
                return self._evaluate_both_branches(statement, statements[index + 1 :], frame)
            outcome = self._evaluate_statement(statement, frame)
            if outcome is not None:
                return outcome
        return None

    def _evaluate_statement(self, node: ast.stmt, frame: Frame) -> Outcome:  # noqa: PLR0912  a case for each form
        match node:
            case ast.Return(value=value):
                return Returned(None if value is None else self.value(value, frame))
            case ast.Raise():
                return Raised()
            case ast.Break() | ast.Continue():
                return Jumped()
            case ast.If():
                return self._evaluate_if(node, frame)
            case ast.For():
                return self._loop(node, frame)
            case ast.While():
                self._open_all(node.body, frame, make_open_value(node.test).decider)
            case ast.With(body=body):
                return self._evaluate_block(body, frame)
            case ast.Try():
                return self._evaluate_try(node, frame)
            case ast.Assign(targets=targets, value=expression):
                value = self.value(expression, frame)
                for target in targets:
                    self._assign(target, value, frame)
            case ast.AnnAssign(target=target, value=ast.expr() as expression):
                self._assign(target, self.value(expression, frame), frame)
            case ast.AugAssign(target=target):
                self._assign(target, self.value(_build_sum(node), frame), frame)
            case ast.Match(subject=subject, cases=cases):
                for case in cases:
                    self._open_all(case.body, frame, make_open_value(subject).decider)
            case ast.Delete(targets=targets):
                for target in targets:
                    self._assign(target, make_open_value(target), frame)
            case ast.Expr(value=expression):
                self._evaluate_expression_statement(expression, frame)
            case ast.Import() | ast.ImportFrom():
                for name, path in frame.module.imports_of(node).items():
                    found = self.constant(self.library.find(path))
                    self.journal.put(frame.names, name, found)
            case ast.FunctionDef(name=name):
                inner = Function(module=frame.module, node=node, closure=frame.visible)
                self.journal.put(frame.names, name, inner)
        return None

    def _evaluate_expression_statement(self, expression: ast.expr, frame: Frame) -> None:
        """Follow an expression that stands alone; a list or a mapping may grow by it."""
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
        """Follow a `try`: its body, and the first handler where the body raises.

        A handler that sets something, of a body that may raise, is a second branch.
        """
        body = [*node.body, *node.orelse]
        outcome, changes = self.journal.follow_branch(partial(self._evaluate_block, body, frame))
        if not node.handlers:
            self.journal.repeat(changes)
        elif isinstance(outcome, Raised):
            outcome = self._evaluate_block(node.handlers[0].body, frame)
        else:
            handler = node.handlers[0].body
            handled, of_handler = self.journal.follow_branch(
                partial(self._evaluate_block, handler, frame)
            )
            if isinstance(handled, Raised) or not (of_handler or isinstance(handled, Returned)):
                self.journal.repeat(changes)
            else:
                decider = f"`try: {format_source(node.body[0])}`"
                self.journal.join(changes, of_handler, decider)
                outcome = _join_outcomes(outcome, handled, decider)
        return self._evaluate_block(node.finalbody, frame) or outcome

    def _loop(self, node: ast.For, frame: Frame) -> Outcome:
        """Follow a loop over plain values round by round; of any other loop, what it sets is open."""
        items = self.value(node.iter, frame)
        if isinstance(items, dict):
            items = list(items)
        is_counted = isinstance(items, list | tuple) and len(items) <= MAX_LOOP_ITERATIONS
        if not is_counted or _has_jumps(node):
            decider = make_open_value(node.iter).decider
            self._open_all(node.body, frame, decider, target=node.target)
            return None
        for item in items:
            self._assign(node.target, item, frame)
            outcome = self._evaluate_block(node.body, frame)
            if outcome is not None:
                return outcome
        return self._evaluate_block(node.orelse, frame)

    def _open_all(
        self,
        statements: Sequence[ast.stmt],
        frame: Frame,
        decider: str,
        *,
        target: ast.expr | None = None,
    ) -> None:
        """Leave open what statements set that run nobody knows how often."""
        if target is not None:
            self._assign(target, Object(decider=decider), frame)
        _, changes = self.journal.follow_branch(partial(self._evaluate_block, statements, frame))
        self.journal.join(changes, {}, decider)

    # -- branches ----------------------------------------------------------------------------------

    def _evaluate_if(self, node: ast.If, frame: Frame) -> Outcome:
        answer = self.answer(node.test, frame)
        if answer is True:
            return self._evaluate_block(node.body, frame)
        if answer is False:
            return self._evaluate_block(node.orelse, frame)
        return self._evaluate_both_branches(node, (), frame)

    def _forks_the_end(self, node: ast.If, frame: Frame) -> bool:
        """Return whether only the run knows which branch is taken, and one may end the block."""
        return _may_end(node) and self.answer(node.test, frame) is None

    def _evaluate_both_branches(
        self, node: ast.If, statements_after: Sequence[ast.stmt], frame: Frame
    ) -> Outcome:
        """Follow both branches of a condition that only the run decides.

        `statements_after` are the statements behind it, where a branch may end the block.
        """
        taken, of_taken = self.journal.follow_branch(
            partial(self._evaluate_block, [*node.body, *statements_after], frame)
        )
        left, of_left = self.journal.follow_branch(
            partial(self._evaluate_block, [*node.orelse, *statements_after], frame)
        )
        if isinstance(taken, Raised):
            self.journal.repeat(of_left)
            return left
        if isinstance(left, Raised):
            self.journal.repeat(of_taken)
            return taken
        decider = make_open_value(node.test).decider
        self.journal.join(of_taken, of_left, decider)
        return _join_outcomes(taken, left, decider)

    # -- assignments -------------------------------------------------------------------------------

    def _assign(self, target: ast.expr, value: Value, frame: Frame) -> None:
        match target:
            case ast.Name(id=name):
                self.journal.put(frame.names, name, value)
            case ast.Attribute(value=inner, attr=name):
                holder = self.value(inner, frame)
                if isinstance(holder, Object):
                    self.state(holder, name, value, format_origin(frame, target))
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for place, part in enumerate(targets):
                    self._assign(part, _get_element(value, place, part), frame)
            case ast.Subscript(value=inner, slice=index):
                holder, key = self.value(inner, frame), self.value(index, frame)
                if isinstance(holder, dict) and is_plain(key):
                    self._assign(inner, {**holder, key: value}, frame)
                elif isinstance(holder, Object) and isinstance(key, str):
                    self.state(holder, key, value, format_origin(frame, target))


def collect_defaults(signature: ast.arguments) -> list[tuple[ast.arg, ast.expr]]:
    """Return the parameters with a default, each with the expression of it."""
    positional = [*signature.posonlyargs, *signature.args]
    with_default = positional[len(positional) - len(signature.defaults) :]
    defaults = list(zip(with_default, signature.defaults, strict=True))
    for parameter, expression in zip(signature.kwonlyargs, signature.kw_defaults, strict=True):
        if expression is not None:
            defaults.append((parameter, expression))
    return defaults


def _join_outcomes(first: Outcome, second: Outcome, decider: str) -> Outcome:
    """Return how two branches end together."""
    if first is None and second is None:
        return None
    values: list[Value] = []
    for outcome in (first, second):
        values.append(outcome.value if isinstance(outcome, Returned) else None)
    if is_same(*values):
        return Returned(values[0])
    return Returned(Object(decider=decider))


def _may_end(node: ast.If) -> bool:
    """Return whether a branch of a condition may end the block: it returns, raises or jumps."""
    for statement in (*node.body, *node.orelse):
        for inner in ast.walk(statement):
            if isinstance(inner, ENDING_STATEMENTS):
                return True
    return False


def _has_jumps(node: ast.For) -> bool:
    return any(isinstance(inner, ast.Break | ast.Continue) for inner in ast.walk(node))


def _get_element(value: Value, index: int, target: ast.expr) -> Value:
    """Return the part of a value that is unpacked."""
    if isinstance(value, tuple | list) and index < len(value):
        return value[index]
    if isinstance(value, Object) and value.decider:
        return Object(decider=value.decider)
    return make_open_value(target)


def _build_sum(node: ast.AugAssign) -> ast.expr:
    """Return the expression that an assignment such as `+=` assigns."""
    target = ast.parse(format_source(node.target), mode="eval").body
    return ast.copy_location(ast.BinOp(left=target, op=node.op, right=node.value), node)
