"""`Evaluator`: a function of a Python program, followed by its syntax, statement by statement.

    evaluator = Evaluator(library)
    container = evaluator.evaluate_function(function)    # an `Object`: fields, each with its statement

No program is imported or run. A function with source is followed at each of its calls, with its
arguments, its defaults and the names of the function around it.

These statements are followed:

    x = value, cfg.model.x = value, x[key] = value    also annotated, and into several targets
    if, elif, else       If only the run knows the answer, both branches are followed. A name or field
                         that differs after them has an open value, whose decider is the condition. A
                         branch that raises an error makes no run, so that only the other one counts.
    for                  A loop over known items without `break` and `continue`.
    try                  The body and the first handler are two branches.
    with                 Its body.
    return, raise
    sys.exit(), exit()   The end of a path, as `raise` is.
    import, from         Of the source of Megatron Bridge.
    x.append(value), x.extend(values), x.update(mapping)

These statements are not followed:

    for, while           Any other loop. Everything that its body sets is open.
    match                Everything that its cases set is open.
    x += value, del x    The name or field is open.
    def, class           The name of a function or class inside a function is open.
    global, nonlocal     They are ignored.

The expressions are listed in `expressions.py`.
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
from bridge.read.megatron_bridge.journal import Changes
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
EXIT_FUNCTIONS = ("sys.exit", "os._exit", "exit", "quit")
"""Functions that end the program."""
MAX_LOOP_ITERATIONS = 512
"""Most iterations of a loop that is followed."""


@dataclass(frozen=True, slots=True)
class Returned:
    """The end of a function, with its value."""

    value: Value


class Raised:
    """The end of a path that raises an error, or ends the program."""


Outcome = Returned | Raised | None
"""The end of a block; None if the statement after it is next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """A branch that was followed, and whose changes are undone."""

    outcome: Outcome
    changes: Changes


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
        for decider, value in frame.early_returns.items():
            outcome = _join_outcomes(outcome, Returned(value), decider)
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

        If a branch of an open condition may return, the statements after it are followed for each
        branch. Otherwise both branches are joined, and the block goes on.
        """
        for index, statement in enumerate(statements):
            self._statement_count += 1
            if self.is_exhausted:
                return Returned(Object(decider=TOO_LONG))
            if isinstance(statement, ast.If):
                answer = self.answer(statement.test, frame)
                if answer is None and _may_return(statement):
                    return self._evaluate_both_branches(statement, statements[index + 1 :], frame)
                outcome = self._evaluate_if(statement, answer, frame)
            else:
                outcome = self._evaluate_statement(statement, frame)
            if outcome is not None:
                return outcome
        return None

    def _evaluate_statement(self, node: ast.stmt, frame: Frame) -> Outcome:
        """Follow a statement other than a condition, and return its end."""
        match node:
            case ast.Return(value=None):
                return Returned(None)
            case ast.Return(value=ast.expr() as expression):
                return Returned(self.value(expression, frame))
            case ast.Raise():
                return Raised()
            case ast.Expr(value=ast.Call(func=called)) if format_source(called) in EXIT_FUNCTIONS:
                return Raised()
            case ast.For():
                return self._evaluate_loop(node, frame)
            case ast.With():
                return self._evaluate_with(node, frame)
            case ast.Try():
                return self._evaluate_try(node, frame)
        self._evaluate_simple_statement(node, frame)
        return None

    def _evaluate_simple_statement(self, node: ast.stmt, frame: Frame) -> None:
        """Follow a statement after which the next one of the block is reached.

        A statement that has no case changes no name and no field.
        """
        match node:
            case ast.Assign(targets=targets, value=expression):
                value = self.value(expression, frame)
                for target in targets:
                    self._assign(target, value, frame)
            case ast.AnnAssign(target=target, value=ast.expr() as expression):
                self._assign(target, self.value(expression, frame), frame)
            case ast.Expr(value=expression):
                self._evaluate_expression_statement(expression, frame)
            case ast.Import() | ast.ImportFrom():
                for name, path in frame.module.imports_of(node).items():
                    imported = self.constant(self.library.find(path))
                    self.journal.put(frame.names, name, imported)
            case ast.While(test=test, body=body):
                self._open_changes(body, frame, make_open_value(test).decider)
            case ast.Match(subject=subject, cases=cases):
                for case in cases:
                    self._open_changes(case.body, frame, make_open_value(subject).decider)
            case _:
                self._open_names(node, frame)

    def _open_names(self, node: ast.stmt, frame: Frame) -> None:
        """Leave the names and fields open that a short statement without a followed form sets."""
        match node:
            case ast.AugAssign(target=changed):
                self._assign(changed, make_open_value(changed), frame)
            case ast.Delete(targets=targets):
                for target in targets:
                    self._assign(target, make_open_value(target), frame)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                decider = f"{name}, which a function of {frame.module.file} defines,"
                self.journal.put(frame.names, name, Object(decider=decider))

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

    def _evaluate_with(self, node: ast.With, frame: Frame) -> Outcome:
        """Follow the body of a `with` statement. The names after `as` are open."""
        for item in node.items:
            value = make_open_value(item.context_expr)
            if item.optional_vars is not None:
                self._assign(item.optional_vars, value, frame)
        return self._evaluate_block(node.body, frame)

    def _evaluate_try(self, node: ast.Try, frame: Frame) -> Outcome:
        """Follow a `try` statement.

        The body may raise an error when the program runs. So the first handler is a second branch, if
        it sets a name or a field, or returns.
        """
        body = [*node.body, *node.orelse]
        branch = self._follow_branch(body, frame)
        if node.handlers:
            handler = self._follow_branch(node.handlers[0].body, frame)
            if handler.changes or handler.outcome is not None:
                decider = f"`try: {format_source(node.body[0])}`"
                outcome = self._join_branches(branch, handler, decider)
                return self._evaluate_block(node.finalbody, frame) or outcome
        self.journal.repeat(branch.changes)
        return self._evaluate_block(node.finalbody, frame) or branch.outcome

    def _evaluate_loop(self, node: ast.For, frame: Frame) -> Outcome:
        """Follow a loop over known items, one iteration after the other.

        Everything that any other loop sets is open.
        """
        items = self.value(node.iter, frame)
        if (
            not isinstance(items, list | tuple)
            or len(items) > MAX_LOOP_ITERATIONS
            or _may_end_early(node)
        ):
            decider = make_open_value(node.iter).decider
            self._assign(node.target, Object(decider=decider), frame)
            self._open_changes(node.body, frame, decider)
            return None
        for item in items:
            self._assign(node.target, item, frame)
            outcome = self._evaluate_block(node.body, frame)
            if outcome is not None:
                return outcome
        return self._evaluate_block(node.orelse, frame)

    def _open_changes(self, statements: Sequence[ast.stmt], frame: Frame, decider: str) -> None:
        """Follow statements that run an unknown number of times. Everything that they set is open.

        Args:
            frame: The names of the function. The value that the statements return is added to it.
            decider: The source that decides how often they run.
        """
        branch = self._follow_branch(statements, frame)
        if isinstance(branch.outcome, Returned):
            frame.early_returns[decider] = branch.outcome.value
        self.journal.join(branch.changes, {}, decider)

    # -- branches ----------------------------------------------------------------------------------

    def _evaluate_if(self, node: ast.If, answer: bool | None, frame: Frame) -> Outcome:
        """Follow the branch of a condition that is taken, or both branches of an open condition."""
        if answer is True:
            return self._evaluate_block(node.body, frame)
        if answer is False:
            return self._evaluate_block(node.orelse, frame)
        return self._evaluate_both_branches(node, (), frame)

    def _evaluate_both_branches(
        self, node: ast.If, statements_after: Sequence[ast.stmt], frame: Frame
    ) -> Outcome:
        """Follow both branches of an open condition, and join them.

        Args:
            node: The condition.
            statements_after: The statements after it, if a branch may return. They are followed for
                each branch.
            frame: The names of the function.
        """
        body = self._follow_branch([*node.body, *statements_after], frame)
        other = self._follow_branch([*node.orelse, *statements_after], frame)
        return self._join_branches(body, other, make_open_value(node.test).decider)

    def _follow_branch(self, statements: Sequence[ast.stmt], frame: Frame) -> Branch:
        """Follow the statements of a branch, and undo its changes."""
        follow = partial(self._evaluate_block, statements, frame)
        outcome, changes = self.journal.follow_branch(follow)
        return Branch(outcome=outcome, changes=changes)

    def _join_branches(self, first: Branch, second: Branch, decider: str) -> Outcome:
        """Apply the changes of two branches of which the program takes one, and return their end.

        A branch that raises an error makes no run, so that only the other one counts.
        """
        if isinstance(first.outcome, Raised):
            self.journal.repeat(second.changes)
            return second.outcome
        if isinstance(second.outcome, Raised):
            self.journal.repeat(first.changes)
            return first.outcome
        self.journal.join(first.changes, second.changes, decider)
        return _join_outcomes(first.outcome, second.outcome, decider)

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


def _may_return(node: ast.If) -> bool:
    """Return whether a branch of a condition may return."""
    return any(isinstance(inner, ast.Return) for inner in ast.walk(node))


def _may_end_early(node: ast.For) -> bool:
    """Return whether a loop has a `break` or a `continue`."""
    return any(isinstance(inner, ast.Break | ast.Continue) for inner in ast.walk(node))


def _get_element(value: Value, index: int, target: ast.expr) -> Value:
    """Return the element of a value that is unpacked into several targets."""
    if isinstance(value, tuple | list) and index < len(value):
        return value[index]
    if isinstance(value, Object) and value.decider:
        return Object(decider=value.decider)
    return make_open_value(target)
