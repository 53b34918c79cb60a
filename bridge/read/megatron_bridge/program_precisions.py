"""`collect_precisions`: the precisions that the functions of a Python program of Megatron Bridge state.

Each function that sets the `mixed_precision` of a container itself is followed by the evaluator. A
condition may decide the precision, and its answer may be known only when the program runs. Then each
answer is a run of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.read.megatron_bridge.evaluator import TOO_LONG, Evaluator, collect_defaults
from bridge.read.megatron_bridge.expressions import Frame, format_origin, make_open_value
from bridge.read.megatron_bridge.plain_data import get_decider
from bridge.read.megatron_bridge.saved_container import CONTAINER_NAME
from bridge.read.megatron_bridge.source_library import Library, find_library
from bridge.read.megatron_bridge.stated_precision import StatedPrecision, read_stated_precision
from bridge.read.megatron_bridge.values import Function, Object, Value, strip_late_clause
from bridge.read.run_keys import PRECISION_KEY
from bridge.read.text.python_calls import format_source, parse_python

if TYPE_CHECKING:
    from bridge.read.text.document import Document

DEFAULT_CLAUSE = "as the default of {name}"
CONDITION_CLAUSE = "where {condition}"
MAX_CONDITIONS = 4
"""Most conditions of one precision that are answered. Fields that further conditions decide are open."""
MAX_NAMED_FUNCTIONS = 3
"""Most functions in the label of a precision that several functions state."""
MODULE_FUNCTION_NAME = "the module"
"""Name of the statements outside of functions in a label."""


@dataclass(frozen=True, kw_only=True)
class ProgramPrecision:
    """A precision of a program, and the functions that state it."""

    precision: StatedPrecision
    label: str
    """The functions, and the conditions: "line 5, one; where low"."""


def collect_precisions(document: Document) -> tuple[ProgramPrecision, ...]:
    """Return each precision that a program states, in the order of its functions.

    Raises:
        PayloadError: The file is no Python.
    """
    path = Path(document.path)
    tree = parse_python(document.text, document.path)
    library = find_library(path)
    module = library.make_module(path, tree)
    same_precisions: dict[str, list[ProgramPrecision]] = {}
    for node in _list_functions(tree):
        if not any(map(_sets_precision, _iterate_nodes(node))):
            continue
        function = Function(module=module, node=node)
        for program_precision in _ConditionSearch(library, function).precisions():
            same_precisions.setdefault(repr(program_precision.precision), []).append(
                program_precision
            )
    return tuple(map(_merge_same_precisions, same_precisions.values()))


def _merge_same_precisions(same: Sequence[ProgramPrecision]) -> ProgramPrecision:
    """Return one precision with the functions that state it."""
    labels = list(dict.fromkeys(precision.label for precision in same))
    label = " and ".join(labels[:MAX_NAMED_FUNCTIONS])
    if len(labels) > MAX_NAMED_FUNCTIONS:
        label += f" and {len(labels) - MAX_NAMED_FUNCTIONS} more"
    return ProgramPrecision(precision=same[0].precision, label=label)


def _list_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """Return the functions of a file in its order. The last one has the statements of the file itself."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    functions.sort(key=lambda node: node.lineno)
    no_parameters = ast.arguments(
        posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[]
    )
    module_function = ast.FunctionDef(
        name=MODULE_FUNCTION_NAME, args=no_parameters, body=tree.body, decorator_list=[], lineno=1
    )
    return [*functions, module_function]


def _iterate_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of the functions and classes inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child
            yield from _iterate_nodes(child)


def _sets_precision(node: ast.AST) -> bool:
    """Return whether a node sets the precision of a container, or a field of it."""
    match node:
        case ast.Attribute(attr=name, value=holder, ctx=ast.Store()):
            return PRECISION_KEY in (name, getattr(holder, "attr", ""))
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), keywords=keywords):
            return name == CONTAINER_NAME and any(
                keyword.arg == PRECISION_KEY for keyword in keywords
            )
    return False


def _format_condition(test: ast.expr, answer: bool) -> str:
    """Return the condition that holds if a test has an answer: `not low` for False."""
    if answer:
        return format_source(test)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return format_source(test.operand)
    return f"not {format_source(test)}"


@dataclass(frozen=True, kw_only=True)
class _Branch:
    """A precision of a function, and the answers of the conditions that lead to it."""

    precision: StatedPrecision
    conditions: tuple[str, ...]


class _ConditionSearch:
    """The precisions of a function, for each answer of the conditions that decide them."""

    def __init__(self, library: Library, function: Function) -> None:
        self.library = library
        self.function = function

    def precisions(self) -> list[ProgramPrecision]:
        """Return the precisions of the function, one for each answer that decides them.

        The label of a precision names the parameters whose defaults decide it.
        """
        defaults: Sequence[str] = ()
        branches = self._branches((), {}, ())
        if branches:
            defaults = self._describe_used_defaults()
        else:
            # The defaults may make the function raise an error, so that it has no container.
            branches = self._branches(self._list_defaulted_parameters(), {}, ())
        distinct: dict[str, _Branch] = {}
        for branch in branches:
            distinct.setdefault(repr(branch.precision), branch)
        location = f"line {self.function.node.lineno}, {self.function.node.name}"
        program_precisions: list[ProgramPrecision] = []
        for branch in distinct.values():
            conditions: Sequence[str] = ()
            if len(distinct) > 1:  # a single precision does not depend on the conditions
                conditions = branch.conditions
            label = "; ".join((location, *defaults, *conditions))
            program_precisions.append(ProgramPrecision(precision=branch.precision, label=label))
        return program_precisions

    def _branches(
        self,
        open_names: Sequence[str],
        answers: Mapping[str, bool],
        conditions: tuple[str, ...],
    ) -> list[_Branch]:
        """Return the precisions that the function states.

        Args:
            open_names: Parameters whose arguments are open.
            answers: Condition -> the answer that is taken.
            conditions: Clauses that describe the answers.
        """
        evaluator = _PrecisionEvaluator(self.library, answers)
        containers = evaluator.containers(self.function, self._make_open_arguments(open_names))
        decisive_condition = None
        if len(answers) < MAX_CONDITIONS:
            decisive_condition = evaluator.find_decisive_condition(containers)
        branches: list[_Branch] = []
        if decisive_condition is None:
            for container in containers:
                precision = read_stated_precision(container)
                branches.append(_Branch(precision=precision, conditions=conditions))
            return branches
        test = evaluator.conditions[decisive_condition]
        for answer in (True, False):
            condition = CONDITION_CLAUSE.format(condition=_format_condition(test, answer))
            further_answers = {**answers, decisive_condition: answer}
            branches += self._branches(open_names, further_answers, (*conditions, condition))
        return branches

    def _describe_used_defaults(self) -> list[str]:
        """Return a clause for each parameter whose default affects the precision.

        A default affects it if the precision changes without the default.
        """
        names = self._list_defaulted_parameters()
        if not names:
            return []
        stated = self._describe_precisions(())
        if self._describe_precisions(names) == stated:
            return []
        clauses: list[str] = []
        for name in names:
            if self._describe_precisions((name,)) != stated:
                clauses.append(DEFAULT_CLAUSE.format(name=name))
        return clauses

    def _describe_precisions(self, open_names: Sequence[str]) -> str:
        """Return a text of the function's precisions if some parameters are open, to compare them by."""
        evaluator = _PrecisionEvaluator(self.library, {})
        containers = evaluator.containers(self.function, self._make_open_arguments(open_names))
        return repr(list(map(read_stated_precision, containers)))

    def _list_defaulted_parameters(self) -> list[str]:
        """Return the names of the parameters with a default."""
        return [parameter.arg for parameter, _ in collect_defaults(self.function.node.args)]

    def _make_open_arguments(self, open_names: Sequence[str]) -> dict[str, Value]:
        """Return open arguments for some parameters."""
        arguments: dict[str, Value] = {}
        for name in open_names:
            decider = f"the argument {name} of {self.function.node.name}"
            arguments[name] = Object(decider=decider)
        return arguments


class _PrecisionEvaluator(Evaluator):
    """An evaluator that collects the containers whose precision a function sets.

    It also takes the given answers of conditions that are known only when the program runs.
    """

    def __init__(self, library: Library, answers: Mapping[str, bool]) -> None:
        super().__init__(library)
        self.answers = answers
        """Name of a condition -> the answer that is taken."""
        self.conditions: dict[str, ast.expr] = {}
        """Name of each condition without a known answer -> its expression."""
        self._holders: dict[int, Object] = {}
        """Objects with a precision, by identity, in the order in which they got it."""

    def containers(self, function: Function, arguments: Mapping[str, Value]) -> list[Object]:
        """Return the container that a function returns, or else the containers whose precision it sets.

        Args:
            arguments: Name of a parameter -> its argument.
        """
        self.library.forget_values()
        returned = self.evaluate_function(function, arguments)
        if self.is_exhausted:
            return [Object(decider=TOO_LONG)]
        if isinstance(returned, Object) and self._is_set(returned):
            return [returned]
        return list(filter(self._is_set, self._holders.values()))

    def find_decisive_condition(self, containers: Sequence[Object]) -> str | None:
        """Return a condition that decides a precision and has no answer yet; None if there is none."""
        for container in containers:
            precision = read_stated_precision(container)
            for decider in (container.decider, precision.decider, *precision.open_fields.values()):
                condition = strip_late_clause(decider)
                if condition in self.conditions and condition not in self.answers:
                    return condition
        return None

    def _is_set(self, container: Object) -> bool:
        """Return whether a statement sets the precision of a container or a field of it.

        It may be a statement in a branch of an open condition.
        """
        stated = container.fields.get(PRECISION_KEY)
        if stated is None:
            return strip_late_clause(container.decider) in self.conditions
        value = stated.value
        if stated.origin or not isinstance(value, Object):
            return bool(stated.origin)
        is_conditional = strip_late_clause(value.decider) in self.conditions
        return is_conditional or any(inner.origin for inner in value.fields.values())

    def answer(self, test: ast.expr, frame: Frame) -> bool | None:
        """Return the answer of a condition, or the one that is taken if its answer is not known."""
        answer = super().answer(test, frame)
        if answer is None:
            condition = get_decider(make_open_value(test))
            self.conditions[condition] = test
            answer = self.answers.get(condition)
        return answer

    def state(self, holder: Object, name: str, value: Value, origin: str) -> None:
        """Write a field of an object, and collect the object if the field is the precision."""
        super().state(holder, name, value, origin)
        if name == PRECISION_KEY:
            self._holders[id(holder)] = holder

    def _evaluate_call(self, node: ast.Call, frame: Frame) -> Value:
        """Return the result of a call, and collect it if it is an object with a precision."""
        result = super()._evaluate_call(node, frame)
        if isinstance(result, Object) and PRECISION_KEY in result.fields:
            self._holders[id(result)] = result
        return result

    def _assign(self, target: ast.expr, value: Value, frame: Frame) -> None:
        """Assign a value. A precision that is set on an unknown value is that of a new open container."""
        match target:
            case ast.Attribute(value=inner, attr="mixed_precision"):
                if not isinstance(self.value(inner, frame), Object):
                    holder = Object(decider=f"`{format_source(inner)}`")
                    self.state(holder, PRECISION_KEY, value, format_origin(frame, target))
                    return
        super()._assign(target, value, frame)
