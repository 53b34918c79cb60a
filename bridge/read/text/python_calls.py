"""Calls in a Python file, with the arguments that are plain values; nothing is imported or run.

Names are followed through the file's imports, so that `L.Trainer` is `lightning.Trainer` and a
class of the file's own is nobody else's. A call under `if False:` is left out, and a name that is
bound twice has no value here.
"""

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bridge.errors import PayloadError

MAX_CHARACTERS = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call by name."""

    name: str
    """The last word of the callee, no alias; for `run.Config(Thing, ...)` and `partial(Thing, ...)`
    Thing."""
    line: int
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments that are plain; `torch.bfloat16` as that text."""
    undecided: dict[str, str] = field(default_factory=dict)
    """Keyword arguments that only a run decides, as written."""
    positional: tuple[Any, ...] = ()
    written: dict[str, str] = field(default_factory=dict)
    """Every argument as written, the positional ones under "0", "1", ..."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """The calls and assignments of a Python file that were asked for."""

    calls: tuple[Call, ...]
    assignments: tuple[tuple[int, str, str], ...]
    """Line, target with the file's imports followed, and the value as written."""


def program_of(text: str, path: str, wanted: Callable[[str], object]) -> Program:
    """Return the calls and assignments of a file whose callee or target ends in a `wanted` word, in order."""
    tree = parsed(text, path)
    try:
        names = Names(tree)
        live = list(_live(tree))
        callees = [(node, *_callee(node)) for node in live if isinstance(node, ast.Call)]
        calls = [
            _call(names, *found)
            for found in callees
            if wanted(names.path(found[1]).rpartition(".")[2])
        ]
        made = [
            (node.lineno, names.path(target), source_of(node.value))
            for node in live
            if isinstance(node, ast.Assign)
            for target in node.targets
            if wanted(names.path(target).rpartition(".")[2])
        ]
    except (RecursionError, MemoryError, ValueError):
        raise _too_deep(path) from None
    calls.sort(key=lambda call: call.line)
    return Program(calls=tuple(calls), assignments=tuple(sorted(made)))


def parsed(text: str, path: str) -> ast.Module:
    """Return the syntax tree of a file.

    PayloadError for one that is too long or too deep, or no Python.
    """
    if len(text) > MAX_CHARACTERS:
        rule = f"must not be longer than {MAX_CHARACTERS} characters"
        raise PayloadError(f"{path}: {rule}. Give the part that configures.", path=path)
    try:
        return ast.parse(text)
    except SyntaxError as error:
        rule = f"must be Python; {error.msg}"
        raise PayloadError(
            f"{path}, line {error.lineno or 1}: {rule}. Correct it there.", path=path
        ) from None
    except (RecursionError, MemoryError, ValueError):
        raise _too_deep(path) from None


def _too_deep(path: str) -> PayloadError:
    return PayloadError(
        f"{path}: must be Python of ordinary depth. This is no configuration.", path=path
    )


class Names:
    """Values of a file's names: imports, and constants of its top level."""

    def __init__(self, tree: ast.Module) -> None:
        self.imported: dict[str, str] = {}
        self.star = ""
        self.constants: dict[str, Any] = {}
        self.bound: Counter[str] = Counter()
        for node in ast.walk(tree):
            match node:
                case ast.Import(names=aliases):
                    for alias in aliases:
                        first = alias.name.partition(".")[0]
                        self._bind(alias.asname or first, alias.name if alias.asname else first)
                case ast.ImportFrom(names=aliases):
                    module = f"{'.' * node.level}{node.module or ''}."
                    for alias in aliases:
                        self._bind(alias.asname or alias.name, module + alias.name)
                    self.star = module if aliases[0].name == "*" else self.star
                case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                    self.bound[name] += 1
                case (
                    ast.FunctionDef(name=name)
                    | ast.AsyncFunctionDef(name=name)
                    | ast.ClassDef(name=name)
                ):
                    self.bound[name] += 1
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if self.bound[name] == 1:
                    plain, constant = self.plain(value)
                    self.constants |= {name: constant} if plain else {}

    def _bind(self, name: str, path: str) -> None:
        self.imported[name] = path
        self.bound[name] += 1

    def path(self, node: ast.AST) -> str:
        """Return the dotted name of an expression; a name of the file's own begins with a dot."""
        words: list[str] = []
        while isinstance(node, ast.Attribute):
            words.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ".".join(["?", *reversed(words)])
        own = f".{node.id}" if self.bound[node.id] else f"{self.star}{node.id}"
        return ".".join([self.imported.get(node.id, own), *reversed(words)])

    def plain(self, node: ast.AST) -> tuple[bool, Any]:
        """Return whether an expression is a plain value, and the value."""
        if isinstance(node, ast.Constant):
            return isinstance(node.value, str | int | float | bool | None), node.value
        if isinstance(node, ast.Name) and node.id in self.constants:
            return True, self.constants[node.id]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            (_, left), (_, right) = self.plain(node.left), self.plain(node.right)
            small = (
                isinstance(left, int)
                and isinstance(right, int)
                and abs(left) <= 10
                and 0 <= right <= 64
            )
            return small, left**right if small else None
        path = self.path(node) if isinstance(node, ast.Attribute | ast.Name) else ""
        return (True, path) if path.rpartition(".")[0] == "torch" else (False, None)


def _live(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a file, leaving out the body of `if False:`."""
    yield node
    is_dead = (
        isinstance(node, ast.If) and isinstance(node.test, ast.Constant) and not node.test.value
    )
    children = node.orelse if isinstance(node, ast.If) and is_dead else ast.iter_child_nodes(node)
    for child in children:
        yield from _live(child)


def _callee(node: ast.Call) -> tuple[ast.expr, list[ast.expr]]:
    """Return the callee and its positional arguments, with `run.Config(Thing, ...)` seen through."""
    last = getattr(node.func, "attr", getattr(node.func, "id", ""))
    wraps = last in ("Config", "Partial", "partial") and node.args
    return (node.args[0], node.args[1:]) if wraps else (node.func, node.args)


def _call(names: Names, node: ast.Call, callee: ast.expr, positional: list[ast.expr]) -> Call:
    plain: dict[str, Any] = {}
    undecided: dict[str, str] = {}
    written = {str(place): source_of(item) for place, item in enumerate(positional)}
    for keyword in node.keywords:
        name = keyword.arg or "**"
        written[name] = source_of(keyword.value)
        is_plain, value = names.plain(keyword.value)
        if keyword.arg is not None and is_plain:
            plain[name] = value
        else:
            undecided[name] = written[name]
    return Call(
        name=names.path(callee).rpartition(".")[2],
        line=node.lineno,
        arguments=plain,
        undecided=undecided,
        positional=tuple(
            value if is_plain else None for is_plain, value in map(names.plain, positional)
        ),
        written=written,
    )


def source_of(node: ast.AST) -> str:
    """Return an expression as it is written, its beginning where it is long."""
    try:
        return ast.unparse(node)[:120]
    except (RecursionError, ValueError):
        return "..."
