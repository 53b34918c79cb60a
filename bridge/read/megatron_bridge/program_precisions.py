"""`collect_precisions`: the precisions that the functions of a Python program of Megatron Bridge state.

A function counts that itself sets the `mixed_precision` of a container; the evaluator follows it.
Where the answer of a condition decides the precision, and only the run knows it, each answer is a
run of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.read.megatron_bridge.evaluator import TOO_LONG, Evaluator, collect_defaults
from bridge.read.megatron_bridge.expressions import Frame, format_origin, make_open_value
from bridge.read.megatron_bridge.plain_data import get_decider, get_decider_noun
from bridge.read.megatron_bridge.saved_container import CONTAINER_NAME
from bridge.read.megatron_bridge.source_library import Library, find_library
from bridge.read.megatron_bridge.stated_precision import StatedPrecision, read_stated_precision
from bridge.read.megatron_bridge.values import Function, Object, Value
from bridge.read.run_keys import PRECISION_KEY
from bridge.read.text.python_calls import format_source, parse_python

if TYPE_CHECKING:
    from bridge.read.text.document import Document

DEFAULT_CLAUSE = "as the default of {name}"
CONDITION_CLAUSE = "where {condition}"
MAX_CONDITIONS = 4
"""That a function's precision may depend on; what further conditions decide is open."""
MAX_NAMED_FUNCTIONS = 3
"""Functions that are named where several state the same."""
MODULE_FUNCTION_NAME = "the module"


@dataclass(frozen=True, kw_only=True)
class ProgramPrecision:
    """A precision of a program, and the functions that state it."""

    precision: StatedPrecision
    label: str
    """Where: "line 5, one; where low"."""


def collect_precisions(document: Document) -> tuple[ProgramPrecision, ...]:
    """Return each precision that a program states, in the order of its functions.

    Raises:
        PayloadError: It is no Python.
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
    """Return the functions that state the same precision as one."""
    labels = list(dict.fromkeys(found.label for found in same))
    label = " and ".join(labels[:MAX_NAMED_FUNCTIONS])
    if len(labels) > MAX_NAMED_FUNCTIONS:
        label += f" and {len(labels) - MAX_NAMED_FUNCTIONS} more"
    return ProgramPrecision(precision=same[0].precision, label=label)


def _list_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """Return the functions of a file in its order, and the file itself as the last one."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    functions.sort(key=lambda node: node.lineno)
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    module_function = ast.FunctionDef(
        name=MODULE_FUNCTION_NAME, args=nothing, body=tree.body, decorator_list=[], lineno=1
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
    """Return the condition under which a test has an answer."""
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
    """The conditions that decide what precision a function states."""

    def __init__(self, library: Library, function: Function) -> None:
        self.library = library
        self.function = function

    def precisions(self) -> list[ProgramPrecision]:
        """Return the precisions of the function, one for each answer that decides them."""
        defaults: Sequence[str] = ()
        branches = self._branches((), {}, ())
        if branches:
            defaults = self._describe_used_defaults()
        else:  # with its defaults, the function may raise an error
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
        opened_names: Sequence[str],
        answers: Mapping[str, bool],
        conditions: tuple[str, ...],
    ) -> list[_Branch]:
        """Return what the function states under some answers, with some parameters open."""
        follower = _PrecisionEvaluator(self.library, answers)
        containers = follower.containers(self.function, self._make_open_arguments(opened_names))
        noun = None
        if len(answers) < MAX_CONDITIONS:
            noun = follower.maybe_condition(containers)
        branches: list[_Branch] = []
        if noun is None:
            for container in containers:
                precision = read_stated_precision(container)
                branches.append(_Branch(precision=precision, conditions=conditions))
            return branches
        test = follower.conditions[noun]
        for answer in (True, False):
            condition = CONDITION_CLAUSE.format(condition=_format_condition(test, answer))
            taken = {**answers, noun: answer}
            branches += self._branches(opened_names, taken, (*conditions, condition))
        return branches

    def _describe_used_defaults(self) -> list[str]:
        """Return the defaults of parameters on which the precision depends, as clauses."""
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

    def _describe_precisions(self, opened_names: Sequence[str]) -> str:
        """Return a text that tells apart what the function states with some parameters open."""
        follower = _PrecisionEvaluator(self.library, {})
        containers = follower.containers(self.function, self._make_open_arguments(opened_names))
        return repr(list(map(read_stated_precision, containers)))

    def _list_defaulted_parameters(self) -> list[str]:
        """Return the parameters with a default."""
        return [parameter.arg for parameter, _ in collect_defaults(self.function.node.args)]

    def _make_open_arguments(self, opened_names: Sequence[str]) -> dict[str, Value]:
        """Return open arguments for some parameters."""
        arguments: dict[str, Value] = {}
        for name in opened_names:
            decider = f"the argument {name} of {self.function.node.name}"
            arguments[name] = Object(decider=decider)
        return arguments


class _PrecisionEvaluator(Evaluator):
    """An evaluator that keeps the containers whose precision a function sets."""

    def __init__(self, library: Library, answers: Mapping[str, bool]) -> None:
        super().__init__(library)
        self.answers = answers
        """What a condition decides, as a noun -> the answer that is taken."""
        self.conditions: dict[str, ast.expr] = {}
        """Noun of each condition that only the run answers -> the condition."""
        self._holders: dict[int, Object] = {}
        """Objects with a precision, by identity."""

    def containers(self, function: Function, arguments: Mapping[str, Value]) -> list[Object]:
        """Return the container that a function returns, or else those whose precision it sets."""
        self.library.forget_values()
        returned = self.evaluate_function(function, arguments)
        if self.is_exhausted:
            return [Object(decider=TOO_LONG)]
        if isinstance(returned, Object) and self._is_set(returned):
            return [returned]
        return list(filter(self._is_set, self._holders.values()))

    def maybe_condition(self, containers: Sequence[Object]) -> str | None:
        """Return a condition that decides a precision and has no answer yet; None where none does."""
        for container in containers:
            precision = read_stated_precision(container)
            for decider in (container.decider, precision.decider, *precision.open_fields.values()):
                noun = get_decider_noun(decider)
                if noun in self.conditions and noun not in self.answers:
                    return noun
        return None

    def _is_set(self, container: Object) -> bool:
        """Return whether a statement sets the precision of a container or a field of it, or a condition may."""
        stated = container.fields.get(PRECISION_KEY)
        if stated is None:
            return get_decider_noun(container.decider) in self.conditions
        value = stated.value
        if stated.origin or not isinstance(value, Object):
            return bool(stated.origin)
        is_conditional = get_decider_noun(value.decider) in self.conditions
        return is_conditional or any(inner.origin for inner in value.fields.values())

    def answer(self, test: ast.expr, frame: Frame) -> bool | None:
        """Return the answer of a condition, the one that is taken where only the run knows it."""
        answer = super().answer(test, frame)
        if answer is None:
            noun = get_decider(make_open_value(test))
            self.conditions[noun] = test
            answer = self.answers.get(noun)
        return answer

    def state(self, holder: Object, name: str, value: Value, origin: str) -> None:
        """Write a field of an object, and keep the object of a precision."""
        super().state(holder, name, value, origin)
        if name == PRECISION_KEY:
            self._holders[id(holder)] = holder

    def _evaluate_call(self, node: ast.Call, frame: Frame) -> Value:
        made = super()._evaluate_call(node, frame)
        if isinstance(made, Object) and PRECISION_KEY in made.fields:
            self._holders[id(made)] = made
        return made

    def _assign(self, target: ast.expr, value: Value, frame: Frame) -> None:
        """Assign a value; the precision of an object that nobody knows is that of an open one."""
        match target:
            case ast.Attribute(value=inner, attr="mixed_precision"):
                if not isinstance(self.value(inner, frame), Object):
                    holder = Object(decider=f"`{format_source(inner)}`")
                    self.state(holder, PRECISION_KEY, value, format_origin(frame, target))
                    return
        super()._assign(target, value, frame)
