"""Calls that a Python file makes, with the arguments that are plain values; nothing is imported or run."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from bridge.errors import PayloadError

__all__ = ["Call", "calls_of"]

MAX_CHARACTERS = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call by name."""

    name: str
    """The last word of what is called; for `run.Config(Thing, ...)` and `partial(Thing, ...)`, the thing."""
    line: int
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments that are plain; `torch.bfloat16` as that text."""
    undecided: dict[str, str] = field(default_factory=dict)
    """Keyword arguments that only a run decides, as written."""
    positional: tuple[Any, ...] = ()


def calls_of(text: str, path: str, names: frozenset[str]) -> list[Call]:
    """Return the calls of any of `names`, in order.

    Raises:
        PayloadError: The text is no Python, or longer than a configuration is.
    """
    if len(text) > MAX_CHARACTERS:
        raise PayloadError(
            f"{path}: must not be longer than {MAX_CHARACTERS} characters. Give the part that configures."
        )
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise PayloadError(
            f"{path}, line {error.lineno or 1}: must be Python; {error.msg}. Correct it there."
        ) from None
    except (RecursionError, MemoryError, ValueError):
        raise PayloadError(f"{path}: must be Python of ordinary depth. This is no configuration.") from None
    constants = _constants(tree)
    found = [_call(node, constants) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sorted((call for call in found if call.name in names), key=lambda call: call.line)


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Return the names that the file's top level sets to plain values, once."""
    found: dict[str, Any] = {}
    twice = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            plain, value = _plain(node.value, {})
            if name in found or not plain:
                twice.add(name)
            found[name] = value
    return {name: value for name, value in found.items() if name not in twice}


def _call(node: ast.Call, constants: dict[str, Any]) -> Call:
    name, positional = _last(node.func), node.args
    if name in ("Config", "Partial", "partial") and positional:
        name, positional = _last(positional[0]), positional[1:]
    plain: dict[str, Any] = {}
    undecided: dict[str, str] = {}
    for keyword in node.keywords:
        is_plain, value = _plain(keyword.value, constants)
        if keyword.arg is not None and is_plain:
            plain[keyword.arg] = value
        else:
            undecided[keyword.arg or "**"] = _source(keyword.value)
    values = tuple(value if is_plain else None for is_plain, value in (_plain(item, constants) for item in positional))
    return Call(name=name, line=node.lineno, arguments=plain, undecided=undecided, positional=values)


def _source(node: ast.AST) -> str:
    try:
        return ast.unparse(node)[:120]
    except (RecursionError, ValueError):
        return "..."


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _plain(node: ast.AST, constants: dict[str, Any]) -> tuple[bool, Any]:
    """Return whether an expression is a plain value, and the value."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | int | float | bool | None), node.value
    if isinstance(node, ast.Name) and node.id in constants:
        return True, constants[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        plain, value = _plain(node.operand, constants)
        return plain and isinstance(value, int | float), -value if isinstance(value, int | float) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        (left_plain, left), (right_plain, right) = _plain(node.left, constants), _plain(node.right, constants)
        small = isinstance(left, int) and isinstance(right, int) and abs(left) <= 10 and 0 <= right <= 64
        return left_plain and right_plain and small, left**right if small else None
    if isinstance(node, ast.Attribute):
        owner = _last(node.value)
        if owner == "torch" or owner[:1].isupper():  # torch.bfloat16, Format.HYBRID
            return True, f"torch.{node.attr}" if owner == "torch" else node.attr
    return False, None
