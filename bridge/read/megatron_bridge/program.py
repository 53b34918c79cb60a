"""Python programs that make a run of Megatron Bridge: what each function leaves in `mixed_precision`, by syntax alone.

Nothing is imported or run. A function is followed statement by statement, with the functions of the
same file that it calls; where a condition decides, both branches are followed. A value that the
file does not hold stays open, and is named: the function of another file that makes the container,
an argument, an expression.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bridge.precision.config import PEER_FIELDS
from bridge.read.megatron_bridge.exporter import TABLE
from bridge.read.text.python_calls import Names, parsed, source_of
from bridge.registry.registry import REGISTRY

if TYPE_CHECKING:
    from bridge.read.text.document import Document

PACKAGES = ("megatron.bridge", "bridge")
"""Megatron Bridge, and this project, whose modules have the same names."""
ATTRIBUTE = "mixed_precision"
CONTAINER = "ConfigContainer"
CONFIG = "MixedPrecisionConfig"
BY_NAME = "get_mixed_precision_config"
OF_BENCHMARKS = "_perf_precision"
"""Function of its benchmarks that makes a precision from a word; `PRECISIONS` has what it makes."""
PRECISIONS: Mapping[str, Any] = TABLE.data["precisions of benchmarks"]
HARMLESS = ("megatron.bridge.training.", "megatron.core.", "torch.", "logging.")
"""Packages whose functions take a container and leave its precision as it is, until the run
starts."""
DEFAULT = "as the default of"
MAX_DEPTH = 4
"""Of functions of the file that call one another."""
MAX_BRANCHES = 16
"""Ways through one function; of more, the first ones are followed."""
MOST_NAMED = 3
"""Functions that are named where several leave the same."""
OWNERS_DECIDE = "the model's own settings, as mixed_precision is not set,"


@dataclass(frozen=True, kw_only=True)
class Stated:
    """A precision, or the container that holds it, as far as the program states it."""

    name: str = ""
    """The recipe's."""
    arguments: Mapping[str, Any] | None = None
    """Those of a call of `MixedPrecisionConfig`."""
    decided_by: str = ""
    """What decides where neither is there, as a noun."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Assigned afterwards."""
    open_fields: Mapping[str, str] = field(default_factory=dict)
    """Field -> its expression, where only the run decides it."""
    is_set: bool = False
    """The program assigns it, whatever it is."""
    is_text: bool = False
    """The recipe's name itself, of which the runtime makes a config later."""
    branches: tuple[str, ...] = ()
    """Conditions that the file does not decide, with the answer that was taken."""
    given_to: tuple[str, ...] = ()
    """Functions of other files that got the container afterwards, and may change it."""
    plain: tuple[Any, ...] = ()
    """A number or a switch, which is no precision."""

    @property
    def is_precision(self) -> bool:
        """Whether anything of the precision is stated."""
        return bool(
            self.name
            or self.arguments is not None
            or self.fields
            or self.open_fields
            or self.is_set
        )

    @property
    def key(self) -> str:
        """What decides whether two functions state the same."""
        return repr(replace(self, branches=(), is_text=False, is_set=False))

    @property
    def payload(self) -> Any:
        """The input of the import."""
        values: dict[str, Any] = {}
        if self.name:
            if not self.fields:
                return {ATTRIBUTE: self.name}
            values = REGISTRY.get(self.name).to_dict()
        elif self.arguments is not None:
            values = dict(self.arguments)
            if not self.fields:
                values = {"_target_": CONFIG, **values}
        return {ATTRIBUTE: {**values, **self.fields}}


@dataclass(frozen=True, kw_only=True)
class StatedRun:
    """One precision of a program, and the functions that leave it."""

    stated: Stated
    label: str
    """Where: "line 5, one"."""


Environment = dict[str, Stated]


def runs_in(document: Document) -> tuple[StatedRun, ...]:
    """Return each precision that a program states, in the order of its functions.

    Raises:
        PayloadError: It is no Python.
    """
    program = _Program(parsed(document.text, document.path))
    places: dict[str, list[StatedRun]] = {}
    for function in program.functions:
        if not program.states(function):
            continue
        name = getattr(function, "name", "the module")
        line = getattr(function, "lineno", 1)
        for stated in program.left_by(function):
            label = "; ".join((f"line {line}, {name}", *stated.branches))
            places.setdefault(stated.key, []).append(StatedRun(stated=stated, label=label))
    return tuple(map(_together, places.values()))


def _together(runs: Sequence[StatedRun]) -> StatedRun:
    """Return the functions that leave the same as one run."""
    labels = list(dict.fromkeys(run.label for run in runs))
    label = " and ".join(labels[:MOST_NAMED])
    if len(labels) > MOST_NAMED:
        label += f" and {len(labels) - MOST_NAMED} more"
    return StatedRun(stated=runs[0].stated, label=label)


class _Program:
    """A file, its functions and its names."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.names = Names(tree)
        defined = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        defined.sort(key=lambda node: node.lineno)
        self.functions: list[ast.FunctionDef | ast.Module] = [*defined, tree]
        self.by_name = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}

    def states(self, function: ast.FunctionDef | ast.Module) -> bool:
        """Return whether a function itself sets a precision.

        One that only calls another is left out.
        """
        return any(self._sets(node) for node in _own_nodes(function))

    def _sets(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            return node.attr == ATTRIBUTE or _holder(node.value) is not None
        if isinstance(node, ast.Call):
            named = any(keyword.arg == ATTRIBUTE for keyword in node.keywords)
            return named and self._is_of_package(node, CONTAINER)
        return False

    def left_by(self, function: ast.FunctionDef | ast.Module) -> list[Stated]:
        """Return what a function leaves, a value for each way through it that states one."""
        bound: Environment = {}
        if isinstance(function, ast.FunctionDef):
            bound = _Walk(self).arguments(function, None, {})
        distinct: dict[str, Stated] = {}
        for stated in _Walk(self).through(function, bound, depth=0):
            if stated.is_precision:
                distinct.setdefault(stated.key, stated)
        if len(distinct) > 1:
            return list(distinct.values())
        # A single value does not depend on the branches.
        return [
            replace(stated, branches=_defaults(stated.branches)) for stated in distinct.values()
        ]

    def _is_of_package(self, node: ast.Call, name: str) -> bool:
        package, _, called = self.names.path(node.func).rpartition(".")
        return called == name and package.startswith(PACKAGES)

    def value(self, node: ast.expr, values: Environment, depth: int) -> Stated:
        """Return what an expression is: a precision, a container, or neither, which leaves it open."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return _named(node.value, is_text=True)
        if isinstance(node, ast.Constant):
            return Stated(decided_by=OWNERS_DECIDE, plain=(node.value,))
        known = values.get(_dotted(node))
        if known is not None:
            return known
        if isinstance(node, ast.Attribute) and node.attr == ATTRIBUTE:
            return values.get(_dotted(node.value), _open(node))
        if isinstance(node, ast.Call):
            return self._called(node, values, depth)
        is_plain, constant = self.names.plain(node)
        if is_plain and isinstance(constant, str):
            return _named(constant, is_text=True)
        return _open(node)

    def _called(self, node: ast.Call, values: Environment, depth: int) -> Stated:
        """Return what a call makes, where the function is known."""
        package, _, name = self.names.path(node.func).rpartition(".")
        if package.startswith(PACKAGES):
            made = self._made_by_package(name, node, values, depth)
            if made is not None:
                return made
        if package == "" and name in self.by_name and depth < MAX_DEPTH:
            function = self.by_name[name]
            walk = _Walk(self)
            bound = walk.arguments(function, node, values, depth=depth)
            left = walk.through(function, bound, depth=depth + 1)
            if len({stated.key for stated in left}) == 1:
                return left[0]
            return Stated(decided_by=f"{name} of the same file, on a condition,")
        where = f" of {package}" if package.strip(".?") else ""
        return Stated(decided_by=f"{source_of(node)}{where}")

    def _made_by_package(
        self, name: str, node: ast.Call, values: Environment, depth: int
    ) -> Stated | None:
        """Return what a function of Megatron Bridge makes; None for one that is not known."""
        if name == BY_NAME and node.args:
            return replace(self.value(node.args[0], values, depth), is_text=False)
        if name == CONTAINER:
            for keyword in node.keywords:
                if keyword.arg == ATTRIBUTE:
                    return self.value(keyword.value, values, depth)
            return Stated(decided_by=OWNERS_DECIDE)
        if name == CONFIG:
            return self._constructed(node)
        if name in REGISTRY and not (node.args or node.keywords):
            return Stated(name=name)
        if name == OF_BENCHMARKS and len(node.args) == 1:
            is_plain, chosen = self.names.plain(node.args[0])
            if is_plain and str(chosen) in PRECISIONS:
                row = PRECISIONS[str(chosen)]
                return Stated(name=row["recipe"], fields=row["fields"])
        return None

    def _constructed(self, node: ast.Call) -> Stated:
        plain: dict[str, Any] = {}
        late: dict[str, str] = {}
        for keyword in node.keywords:
            is_plain, value = self.names.plain(keyword.value)
            if keyword.arg is not None and is_plain:
                plain[keyword.arg] = value
            else:
                late[keyword.arg or "**"] = source_of(keyword.value)
        return Stated(arguments=plain, open_fields=late)


@dataclass(slots=True)
class _Way:
    """One way through a function."""

    values: Environment
    branches: tuple[str, ...] = ()
    returned: Stated | None = None


class _Walk:
    """One pass through a function, with every way through it."""

    def __init__(self, program: _Program) -> None:
        self.program = program
        self.set: dict[str, None] = {}
        """Names of containers whose precision the function sets."""

    def arguments(
        self,
        function: ast.FunctionDef,
        call: ast.Call | None,
        values: Environment,
        *,
        depth: int = 0,
    ) -> Environment:
        """Return the values of a function's parameters.

        Each is the argument of the call, the default, or an open value.
        """
        positional = [*function.args.posonlyargs, *function.args.args]
        bound: Environment = {}
        for parameter in positional:
            decider = f"the argument {parameter.arg} of {function.name}"
            bound[parameter.arg] = Stated(decided_by=decider)
        for parameter in function.args.kwonlyargs:
            bound[parameter.arg] = Stated(decided_by=f"the argument {parameter.arg}")
        for name, expression in _defaults_of(function):
            default = self.program.value(expression, {}, depth)
            if not (default.is_precision or default.plain):
                continue
            if call is None:
                default = replace(default, branches=(f"{DEFAULT} {name}",))
            bound[name] = default
        if call is None:
            return bound
        for parameter, expression in zip(positional, call.args, strict=False):
            bound[parameter.arg] = self.program.value(expression, values, depth)
        for keyword in call.keywords:
            if keyword.arg in bound:
                bound[keyword.arg] = self.program.value(keyword.value, values, depth)
        return bound

    def through(
        self, function: ast.FunctionDef | ast.Module, bound: Environment, *, depth: int
    ) -> list[Stated]:
        """Return what each path through a function leaves.

        That is the value that it returns, or the containers that it sets.
        """
        every: list[Stated] = []
        for way in self._block(function.body, [_Way(dict(bound))], depth):
            left = [way.values[name] for name in self.set if name in way.values]
            if way.returned is not None:
                left = [way.returned]
            for stated in left:
                branches = (*stated.branches, *way.branches)
                every.append(replace(stated, branches=branches))
        return every

    def _block(self, statements: Sequence[ast.stmt], ways: list[_Way], depth: int) -> list[_Way]:
        done: list[_Way] = []
        for statement in statements:
            after: list[_Way] = []
            for way in ways:
                if way.returned is None:
                    after += self._statement(statement, way, depth)
                else:
                    done.append(way)
            ways = after[:MAX_BRANCHES]
        return [*done, *ways]

    def _statement(self, node: ast.stmt, way: _Way, depth: int) -> list[_Way]:
        match node:
            case ast.If():
                return self._if(node, way, depth)
            case ast.For() | ast.While() | ast.With() | ast.Try():
                inner = [*node.body, *getattr(node, "orelse", ()), *getattr(node, "finalbody", ())]
                return self._block(inner, [way], depth)
            case ast.Return(value=value) if value is not None:
                way.returned = self.program.value(value, way.values, depth)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, value, way, depth)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self._assign(target, value, way, depth)
            case ast.Expr(value=ast.Call() as call):
                self._apply(call, way, depth)
        return [way]

    def _if(self, node: ast.If, way: _Way, depth: int) -> list[_Way]:
        answer = self._answer(node.test, way.values)
        if answer is not None:
            body = node.body if answer else node.orelse
            return self._block(body, [way], depth)
        text = source_of(node.test)
        taken = _Way(dict(way.values), (*way.branches, f"where {text}"))
        left = _Way(dict(way.values), (*way.branches, f"where not {text}"))
        ways = [*self._block(node.body, [taken], depth), *self._block(node.orelse, [left], depth)]
        kept: dict[str, _Way] = {}
        for after in ways:
            values = repr([(name, value.key) for name, value in after.values.items()])
            returned = ""
            if after.returned is not None:
                returned = after.returned.key
            kept.setdefault(f"{returned} {values}", after)
        if len(kept) == 1:
            (only,) = kept.values()
            return [replace(only, branches=way.branches)]
        return list(kept.values())

    def _answer(self, test: ast.expr, values: Environment) -> bool | None:
        """Return the answer of a condition where the file holds it."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                answer = self._answer(inner, values)
                if answer is None:
                    return None
                return not answer
            case ast.Constant(value=value):
                return bool(value)
            case ast.Compare(
                left=left, ops=[ast.Eq()], comparators=[ast.Constant(value=str(wanted))]
            ):
                compared = values.get(_dotted(left))
                if compared is not None and compared.is_text:
                    return compared.name == wanted
            case ast.Call(
                func=ast.Name(id="isinstance"),
                args=[ast.Attribute(attr="mixed_precision") as attribute, ast.Name(id="str")],
            ):
                stated = values.get(_dotted(attribute.value))
                if stated is not None and stated.is_precision:
                    return stated.is_text
        return None

    def _assign(self, target: ast.expr, value: ast.expr, way: _Way, depth: int) -> None:
        if isinstance(target, ast.Name):
            way.values[target.id] = self.program.value(value, way.values, depth)
            if isinstance(value, ast.Call) and _last(value.func) == CONTAINER:
                self.set[target.id] = None
        elif isinstance(target, ast.Attribute) and target.attr == ATTRIBUTE:
            assigned = self.program.value(value, way.values, depth)
            self._set(_dotted(target.value), replace(assigned, is_set=True), way)
        elif isinstance(target, ast.Attribute):
            holder = _holder(target.value)
            if holder is not None:
                self._set(holder, self._with_field(holder, target.attr, value, way), way)
            elif _dotted(target.value) in way.values and target.attr in PEER_FIELDS:
                name = _dotted(target.value)
                stated = way.values[name]
                if stated.name or stated.arguments is not None:
                    way.values[name] = self._with_field(name, target.attr, value, way)

    def _set(self, holder: str, stated: Stated, way: _Way) -> None:
        self.set[holder] = None
        way.values[holder] = stated

    def _with_field(self, holder: str, name: str, value: ast.expr, way: _Way) -> Stated:
        """Return the value of a holder with a field that is assigned."""
        unknown = Stated(decided_by=f"{holder}, which another program makes,")
        stated = way.values.get(holder, unknown)
        is_plain, constant = self.program.names.plain(value)
        branches = stated.branches
        if isinstance(value, ast.Name) and value.id in way.values:
            variable = way.values[value.id]
            if variable.plain:
                is_plain = True
                constant = variable.plain[0]
                branches = tuple(dict.fromkeys((*branches, *variable.branches)))
        fields = dict(stated.fields)
        late = dict(stated.open_fields)
        fields.pop(name, None)
        late.pop(name, None)
        if is_plain:
            fields[name] = constant
        else:
            late[name] = source_of(value)
        return replace(stated, fields=fields, open_fields=late, branches=branches)

    def _apply(self, call: ast.Call, way: _Way, depth: int) -> None:
        """Follow a function of the file that sets the precision of a container which it is given."""
        function = None
        if isinstance(call.func, ast.Name):
            function = self.program.by_name.get(call.func.id)
        if function is None:
            self._note_stranger(call, way)
            return
        if depth >= MAX_DEPTH:
            return
        inner = _Walk(self.program)
        bound = inner.arguments(function, call, way.values, depth=depth)
        ways = inner._block(function.body, [_Way(bound)], depth + 1)
        parameters = [*function.args.posonlyargs, *function.args.args]
        for parameter, argument in zip(parameters, call.args, strict=False):
            if parameter.arg not in inner.set or not _dotted(argument):
                continue
            left: dict[str, Stated] = {}
            for after in ways:
                stated = after.values[parameter.arg]
                left[stated.key] = stated
            if len(left) == 1:
                (stated,) = left.values()
            else:
                stated = Stated(decided_by=f"{function.name}, on a condition,")
            self._set(_dotted(argument), stated, way)

    def _note_stranger(self, call: ast.Call, way: _Way) -> None:
        """Note a function of another file that gets a container whose precision is stated."""
        path = self.program.names.path(call.func)
        if not path.rpartition(".")[0] or path.startswith((".", "?", *HARMLESS)):
            return
        stranger = path.rpartition(".")[2]
        for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
            name = _dotted(argument)
            stated = way.values.get(name)
            if stated is not None and stated.is_precision and not stated.plain:
                given_to = (*stated.given_to, stranger)
                way.values[name] = replace(stated, given_to=given_to)


def _defaults_of(function: ast.FunctionDef) -> list[tuple[str, ast.expr]]:
    """Return the parameters with a default, the last positional parameter first."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[tuple[str, ast.expr]] = []
    pairs = zip(reversed(positional), reversed(arguments.defaults), strict=False)
    for parameter, expression in pairs:
        defaults.append((parameter.arg, expression))
    for parameter, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is not None:
            defaults.append((parameter.arg, default))
    return defaults


def _named(name: str, *, is_text: bool) -> Stated:
    if name in REGISTRY:
        return Stated(name=name, is_text=is_text)
    return Stated(decided_by=f"the recipe {name!r}, which is not registered here,", is_text=is_text)


def _open(node: ast.expr) -> Stated:
    return Stated(decided_by=f"`{source_of(node)}`, which only the run knows,")


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Walk a function without the functions and classes inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child
            yield from _own_nodes(child)


def _holder(node: ast.expr) -> str | None:
    """Return the container of `container.mixed_precision`, None for another expression."""
    if isinstance(node, ast.Attribute) and node.attr == ATTRIBUTE:
        return _dotted(node.value)
    return None


def _defaults(branches: Sequence[str]) -> tuple[str, ...]:
    """Return those of the conditions that are defaults of arguments."""
    return tuple(branch for branch in branches if branch.startswith(DEFAULT))


def _dotted(node: ast.expr) -> str:
    """Return `name` or `name.attribute` as written, empty for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        if inner:
            return f"{inner}.{node.attr}"
    return ""


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return getattr(node, "id", "")
