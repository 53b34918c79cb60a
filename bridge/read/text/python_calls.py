"""`parse_program`: the calls and assignments of a Python file. Nothing is run.

    program = parse_program("L.Trainer(precision=PRECISION)", "a.py", {"Trainer"}.__contains__)
    program.calls[0].name         # "Trainer"
    program.calls[0].open_values    # {"precision": "PRECISION"}

A value is known if it is a constant, or the name of a constant. Names are followed through the
imports of the file: `L.Trainer` is `lightning.Trainer` after `import lightning as L`. A class that
the file itself defines does not count as the imported class. A call under `if False:` is ignored. A
name that is bound twice has no known value.
"""

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bridge.errors import PayloadError

MAX_PROGRAM_CHARACTERS = 256 * 1024
WRAPPER_NAMES = ("Config", "Partial", "partial")
"""Functions that call their first argument later: `run.Config(Thing, ...)`."""
MAX_SOURCE_LENGTH = 120
"""The most characters of an expression that are shown."""


@dataclass(frozen=True, kw_only=True)
class PythonCall:
    """One call by name."""

    name: str
    """The last part of the callee's dotted name, without an alias. For `run.Config(Thing, ...)` it
    is `Thing`."""
    line: int
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments whose values are known. A dtype is its dotted name, "torch.bfloat16"."""
    open_values: dict[str, str] = field(default_factory=dict)
    """Keyword arguments that only a run decides, as they are written."""
    positional: tuple[Any, ...] = ()
    """Positional arguments. An argument that only a run decides is None."""
    written: dict[str, str] = field(default_factory=dict)
    """Every argument as it is written. The positional arguments have the names "0", "1", ..."""


class Assignment(NamedTuple):
    """An assignment. Assignments are sorted by these fields, and so by their lines."""

    line: int
    target: str
    """The dotted name of the target, with the imports of the file followed."""
    written: str
    """The value as it is written."""


@dataclass(frozen=True, kw_only=True)
class PythonProgram:
    """The wanted calls and assignments of a Python file, in the order of their lines."""

    calls: tuple[PythonCall, ...]
    assignments: tuple[Assignment, ...]


def parse_program(text: str, path: str, is_wanted: Callable[[str], object]) -> PythonProgram:
    """Return the wanted calls and assignments of a file.

    Args:
        text: The content of the file.
        path: The name of the file in messages.
        is_wanted: Returns whether a call or assignment is wanted. The argument is the last part of
            the dotted name of the callee or target.

    Raises:
        PayloadError: The file is not Python, or is too long or nested too deeply.
    """
    tree = parse_python(text, path)
    calls: list[PythonCall] = []
    assignments: list[Assignment] = []
    try:
        names = NameResolver(tree)
        for node in list(_walk_live_nodes(tree)):
            if isinstance(node, ast.Call):
                callee, _ = _get_callee(node)
                if is_wanted(_get_last_name(names.path(callee))):
                    calls.append(_make_call(names, node))
            elif isinstance(node, ast.Assign):
                for target in map(names.path, node.targets):
                    if is_wanted(_get_last_name(target)):
                        written = format_source(node.value)
                        assignments.append(Assignment(node.lineno, target, written))
    except (RecursionError, MemoryError, ValueError):
        raise _make_depth_error(path) from None
    calls.sort(key=lambda call: call.line)
    return PythonProgram(calls=tuple(calls), assignments=tuple(sorted(assignments)))


def parse_python(text: str, path: str) -> ast.Module:
    """Return the syntax tree of a file.

    Raises:
        PayloadError: The file is not Python, or is too long or nested too deeply.
    """
    if len(text) > MAX_PROGRAM_CHARACTERS:
        rule = f"must not be longer than {MAX_PROGRAM_CHARACTERS} characters"
        raise PayloadError(f"{path}: {rule}. Give the part that configures.", path=path)
    try:
        return ast.parse(text)
    except SyntaxError as error:
        where = f"{path}, line {error.lineno or 1}"
        sentence = f"{where}: must be Python; {error.msg}. Correct it there."
        raise PayloadError(sentence, path=path) from None
    except (RecursionError, MemoryError, ValueError):
        raise _make_depth_error(path) from None


def _make_depth_error(path: str) -> PayloadError:
    """Return the error about a file that is nested too deeply."""
    return PayloadError(
        f"{path}: must be Python of ordinary depth. This is no configuration.", path=path
    )


class PlainValue(NamedTuple):
    """The value of an expression, if it is known without a run."""

    is_plain: bool
    """Whether the value is known."""
    value: Any = None


class NameResolver:
    """The meaning of the names in a file: imported modules, and constants of the top level."""

    def __init__(self, tree: ast.Module) -> None:
        self.imported: dict[str, str] = {}
        """Name in the file -> dotted name of the imported module or object."""
        self.star = ""
        """The module of `from MODULE import *`, with a dot after it. Empty: no such import."""
        self.constants: dict[str, Any] = {}
        """Name that is bound once, at the top level, to a known value -> the value."""
        self.bound: Counter[str] = Counter()
        """Name -> the number of times that the file binds it."""
        for node in ast.walk(tree):
            self._count_binding(node)
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if self.bound[name] == 1:
                    constant = self.plain(value)
                    if constant.is_plain:
                        self.constants[name] = constant.value

    def _count_binding(self, node: ast.AST) -> None:
        """Count the names that a node binds, and remember imports."""
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    first = alias.name.partition(".")[0]
                    if alias.asname:
                        self._import(alias.asname, alias.name)
                    else:
                        self._import(first, first)
            case ast.ImportFrom(names=aliases):
                module = f"{'.' * node.level}{node.module or ''}."
                for alias in aliases:
                    self._import(alias.asname or alias.name, module + alias.name)
                if aliases[0].name == "*":
                    self.star = module
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                self.bound[name] += 1
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                self.bound[name] += 1

    def _import(self, name: str, path: str) -> None:
        """Bind a name in the file to the dotted name of an import."""
        self.imported[name] = path
        self.bound[name] += 1

    def path(self, node: ast.AST) -> str:
        """Return the dotted name of an expression. A name that the file binds begins with a dot."""
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ".".join(["?", *attributes])
        first = f"{self.star}{node.id}"
        if node.id in self.imported:
            first = self.imported[node.id]
        elif self.bound[node.id]:
            first = f".{node.id}"
        return ".".join([first, *attributes])

    def plain(self, node: ast.AST) -> PlainValue:
        """Return the value of an expression, if it is known without a run."""
        if isinstance(node, ast.Constant):
            return PlainValue(isinstance(node.value, str | int | float | bool | None), node.value)
        if isinstance(node, ast.Name) and node.id in self.constants:
            return PlainValue(True, self.constants[node.id])
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            return self._power(node)
        if isinstance(node, ast.Attribute | ast.Name):
            path = self.path(node)
            if path.rpartition(".")[0] == "torch":
                return PlainValue(True, path)
        return PlainValue(False)

    def _power(self, node: ast.BinOp) -> PlainValue:
        """Return the value of `2**16`. A large power is not computed: it could fill the memory."""
        base = self.plain(node.left).value
        exponent = self.plain(node.right).value
        if not (isinstance(base, int) and isinstance(exponent, int)):
            return PlainValue(False)
        if abs(base) > 10 or not 0 <= exponent <= 64:
            return PlainValue(False)
        return PlainValue(True, base**exponent)


def _walk_live_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree, except for the body of `if False:`."""
    yield node
    children = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and isinstance(node.test, ast.Constant) and not node.test.value:
        children = iter(node.orelse)
    for child in children:
        yield from _walk_live_nodes(child)


def _get_callee(node: ast.Call) -> tuple[ast.expr, list[ast.expr]]:
    """Return the callee of a call and its positional arguments.

    For `run.Config(Thing, x)` they are `Thing` and `x`.
    """
    last = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if last in WRAPPER_NAMES and node.args:
        return node.args[0], node.args[1:]
    return node.func, node.args


def _make_call(names: NameResolver, node: ast.Call) -> PythonCall:
    """Return a call with its arguments."""
    callee, positional = _get_callee(node)
    plain: dict[str, Any] = {}
    open_values: dict[str, str] = {}
    written = {str(index): format_source(argument) for index, argument in enumerate(positional)}
    for keyword in node.keywords:
        name = keyword.arg or "**"
        written[name] = format_source(keyword.value)
        value = names.plain(keyword.value)
        if keyword.arg is not None and value.is_plain:
            plain[name] = value.value
        else:
            open_values[name] = written[name]
    return PythonCall(
        name=_get_last_name(names.path(callee)),
        line=node.lineno,
        arguments=plain,
        open_values=open_values,
        positional=tuple(_get_value_or_none(names.plain(argument)) for argument in positional),
        written=written,
    )


def _get_value_or_none(plain: PlainValue) -> Any:
    """Return a known value. None for a value that only a run decides."""
    if plain.is_plain:
        return plain.value
    return None


def _get_last_name(path: str) -> str:
    """Return the last part of a dotted name."""
    return path.rpartition(".")[2]


def format_source(node: ast.AST) -> str:
    """Return an expression as it is written, cut after `MAX_SOURCE_LENGTH` characters."""
    try:
        return ast.unparse(node)[:MAX_SOURCE_LENGTH]
    except (RecursionError, ValueError):
        return "..."
