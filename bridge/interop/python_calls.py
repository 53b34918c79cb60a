"""What a Python file calls and sets, with the arguments that are plain values; nothing is imported or run.

Names are followed through the file's imports, so that `L.Trainer` is `lightning.Trainer` and a class of the file's own
is nobody else's. What stands under `if False:` is left out, and a name that is bound twice has no value here.
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.errors import PayloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Assignment", "Call", "Program", "calls_of", "program_of"]

MAX_CHARACTERS = 256 * 1024
MAX_SHOWN = 120
REBINDERS = frozenset({"exec", "globals", "locals"})
"""A file that calls one of these can give any of its names another value."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call by name."""

    name: str
    """The last word of what is called, no alias; for `run.Config(Thing, ...)` and `partial(Thing, ...)` Thing."""
    line: int
    path: str = ""
    """All of it, with the file's imports followed: "lightning.pytorch.Trainer"."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments that are plain; `torch.bfloat16` as that text."""
    undecided: dict[str, str] = field(default_factory=dict)
    """Keyword arguments that only a run decides, as written."""
    positional: tuple[Any, ...] = ()
    written: dict[str, str] = field(default_factory=dict)
    """Every argument as written, the positional ones under "0", "1", ...; what is called itself under ""."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """`a.b.c = value` or `a.b["key"] = value`."""

    path: str
    """What is assigned to, with the file's imports followed."""
    key: str | None
    line: int
    value: Any
    """The value where it is plain, else None."""
    written: str
    """The value as written."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A Python file, read."""

    calls: tuple[Call, ...]
    assignments: tuple[Assignment, ...]
    imports: frozenset[str]
    """Dotted names that it imports."""


def calls_of(text: str, path: str, names: frozenset[str]) -> list[Call]:
    """Return the calls of any of `names`, in order.

    Raises:
        PayloadError: The text is no Python, or longer than a configuration is.
    """
    return list(program_of(text, path, names.__contains__).calls)


def program_of(text: str, path: str, wanted: Callable[[str], object]) -> Program:
    """Return what a file calls and sets, in order; raises as `calls_of`.

    Args:
        text: The file.
        path: What it is called in messages.
        wanted: Says of the last word of what is called or set whether it is asked for.
    """
    if len(text) > MAX_CHARACTERS:
        raise PayloadError(
            f"{path}: must not be longer than {MAX_CHARACTERS} characters. Give the part that configures.",
            path=path,
        )
    try:
        return _read(ast.parse(text), wanted)
    except SyntaxError as error:
        raise PayloadError(
            f"{path}, line {error.lineno or 1}: must be Python; {error.msg}. Correct it there.", path=path
        ) from None
    except (RecursionError, MemoryError, ValueError):
        raise PayloadError(f"{path}: must be Python of ordinary depth. This is no configuration.", path=path) from None


def _read(tree: ast.Module, wanted: Callable[[str], object]) -> Program:
    names = _Names(tree)
    live = list(_live(tree))
    calls = [_call(node, names) for node in live if isinstance(node, ast.Call) and wanted(names.last(_called(node)[0]))]
    sets = [(target, node) for node in live if isinstance(node, ast.Assign) for target in node.targets]
    assignments = [_assigned(target, node, names) for target, node in sets if wanted(names.last(_owner(target)))]
    return Program(
        calls=tuple(sorted(calls, key=lambda call: call.line)),
        assignments=tuple(sorted(assignments, key=lambda made: made.line)),
        imports=frozenset(names.imported.values()),
    )


class _Names:
    """What the names of a file stand for: imports, and constants of its top level."""

    def __init__(self, tree: ast.Module) -> None:
        self.imported: dict[str, str] = {}
        self.star = ""
        self.constants: dict[str, Any] = {}
        self.bound: Counter[str] = Counter()
        loaded: Counter[str] = Counter()
        for node in ast.walk(tree):
            self._bind(node)
            if isinstance(node, ast.Name):
                (loaded if isinstance(node.ctx, ast.Load) else self.bound)[node.id] += 1
        if REBINDERS & set(loaded):
            return
        for node in tree.body:
            target = _target(node)
            if target is None or self.bound[target.id] != 1 or not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            plain, value = self.plain(node.value) if node.value is not None else (False, None)
            if plain and (loaded[target.id] == 1 or not isinstance(value, dict | list)):  # others could fill it
                self.constants[target.id] = value

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = "." * node.level + (node.module or "") + "." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if alias.name == "*":
                    self.star = module
                    continue
                name = alias.asname or (alias.name if module else alias.name.partition(".")[0])
                self.imported[name] = module + (alias.name if alias.asname or module else name)
                self.bound[name] += 1
        elif isinstance(node, ast.arg):
            self.bound[node.arg] += 1
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self.bound[node.name] += 1

    def path(self, node: ast.AST) -> str:
        """Return the dotted name of an expression; a name of the file's own begins with a dot, others are empty."""
        words: list[str] = []
        while isinstance(node, ast.Attribute):
            words.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ".".join(["?", *reversed(words)])
        first = self.imported.get(node.id)
        if first is None:
            first = f".{node.id}" if self.bound[node.id] else f"{self.star}{node.id}"
        return ".".join([first, *reversed(words)])

    def last(self, node: ast.AST) -> str:
        """Return the last word of an expression's dotted name."""
        return self.path(node).rpartition(".")[2]

    def plain(self, node: ast.AST) -> tuple[bool, Any]:
        """Return whether an expression is a plain value, and the value."""
        if isinstance(node, ast.Constant):
            return isinstance(node.value, str | int | float | bool | None), node.value
        if isinstance(node, ast.Name) and node.id in self.constants:
            return True, self.constants[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            plain, value = self.plain(node.operand)
            return plain and isinstance(value, int | float), -value if isinstance(value, int | float) else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            (left_plain, left), (right_plain, right) = self.plain(node.left), self.plain(node.right)
            small = isinstance(left, int) and isinstance(right, int) and abs(left) <= 10 and 0 <= right <= 64
            return left_plain and right_plain and small, left**right if small else None
        if isinstance(node, ast.Dict | ast.List | ast.Tuple):
            return self._collection(node)
        return self._named(node)

    def _collection(self, node: ast.Dict | ast.List | ast.Tuple) -> tuple[bool, Any]:
        keys = [self.plain(key) if key is not None else (False, None) for key in getattr(node, "keys", ())]
        values = [self.plain(value) for value in (node.values if isinstance(node, ast.Dict) else node.elts)]
        if not all(plain and not isinstance(value, dict | list) for plain, value in keys):
            return False, None
        held = [value for _, value in values]
        found = dict(zip([key for _, key in keys], held, strict=True)) if isinstance(node, ast.Dict) else held
        return all(plain for plain, _ in values), found

    def _named(self, node: ast.AST) -> tuple[bool, Any]:
        """Return `torch.bfloat16` and `Format.HYBRID`, which are values by name."""
        path = self.path(node) if isinstance(node, ast.Attribute | ast.Name) else ""
        owner, _, last = path.rpartition(".")
        if owner == "torch":
            return True, path
        member = isinstance(node, ast.Attribute) and last.isupper() and owner.rpartition(".")[2][:1].isupper()
        return (True, last) if member else (False, None)


def _live(tree: ast.Module) -> Iterator[ast.AST]:
    """Walk a file, leaving out what stands under a condition that is written out as false."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        holds = _holds(node.test) if isinstance(node, ast.If | ast.While | ast.IfExp) else None
        if holds is None:
            waiting += ast.iter_child_nodes(node)
        elif isinstance(node, ast.IfExp):
            waiting.append(node.body if holds else node.orelse)
        elif isinstance(node, ast.If | ast.While):
            waiting += node.body if holds else node.orelse


def _holds(test: ast.expr) -> bool | None:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _holds(test.operand)
        return None if inner is None else not inner
    if isinstance(test, ast.Constant):
        return bool(test.value)
    return False if _last(test) == "TYPE_CHECKING" else None


def _called(node: ast.Call) -> tuple[ast.expr, list[ast.expr]]:
    """Return what is called and its positional arguments, with `run.Config(Thing, ...)` seen through."""
    wrapped = _last(node.func) in ("Config", "Partial", "partial") and node.args
    return (node.args[0], node.args[1:]) if wrapped else (node.func, node.args)


def _call(node: ast.Call, names: _Names) -> Call:
    called, positional = _called(node)
    plain: dict[str, Any] = {}
    undecided: dict[str, str] = {}
    written = {"": _source(called), **{str(place): _source(item) for place, item in enumerate(positional)}}
    for keyword in node.keywords:
        name = keyword.arg or "**"
        written[name] = _source(keyword.value)
        is_plain, value = names.plain(keyword.value)
        if keyword.arg is not None and is_plain:
            plain[name] = value
        else:
            undecided[name] = written[name]
    return Call(
        name=names.last(called),
        line=node.lineno,
        path=names.path(called),
        arguments=plain,
        undecided=undecided,
        positional=tuple(value if is_plain else None for is_plain, value in map(names.plain, positional)),
        written=written,
    )


def _owner(target: ast.expr) -> ast.expr:
    return target.value if isinstance(target, ast.Subscript) else target


def _assigned(target: ast.expr, node: ast.Assign, names: _Names) -> Assignment:
    key = names.plain(target.slice)[1] if isinstance(target, ast.Subscript) else None
    return Assignment(
        path=names.path(_owner(target)),
        key=key if isinstance(key, str) else None,
        line=node.lineno,
        value=names.plain(node.value)[1],
        written=_source(node.value),
    )


def _target(node: ast.stmt) -> ast.Name | None:
    """Return the one name that a statement sets."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return targets[0] if len(targets) == 1 and isinstance(targets[0], ast.Name) else None


def _source(node: ast.AST) -> str:
    try:
        return ast.unparse(node)[:MAX_SHOWN]
    except (RecursionError, ValueError):
        return "..."


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
