"""Syntax trees of Python launchers, the files of their modules, and the patterns of `match`."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

from bridge.read.text.python_calls import parse_python


def parse_file(path: Path) -> ast.Module:
    """Return the syntax tree of a program."""
    return _parse_text(path.read_text(encoding="utf-8"), str(path))


@lru_cache(maxsize=64)
def _parse_text(text: str, path: str) -> ast.Module:
    """Return the syntax tree of a text; a launcher is followed once for each branch."""
    return parse_python(text, path)


@lru_cache(maxsize=65_536)
def format_expression(node: ast.AST) -> str:
    """Return an expression as text, which is made once for all branches of a launcher."""
    return ast.unparse(node)


def find_module_file(launcher: Path, path: str) -> Path | None:
    """Return the file of a module in the clone of a launcher; None for a module that is not there."""
    if not path:
        return None
    parts = path.split(".")
    for folder in _list_folders(launcher):
        for file in (
            folder.joinpath(*parts).with_suffix(".py"),
            folder.joinpath(*parts, "__init__.py"),
        ):
            if file.is_file():
                return file
    return None


@lru_cache(maxsize=64)
def _list_folders(path: Path) -> tuple[Path, ...]:
    """Return the folders around a file, the nearest one first."""
    return tuple(path.resolve().parents)


@lru_cache(maxsize=4_096)
def make_read_expression(target: ast.expr) -> ast.expr:
    """Return the target of an assignment as an expression that is read."""
    return ast.copy_location(ast.parse(ast.unparse(target), mode="eval").body, target)


def make_pattern_test(subject: ast.expr, pattern: ast.pattern) -> ast.expr | None:
    """Return the condition that a pattern of `match` is; None for a pattern that is not followed."""
    match pattern:
        case ast.MatchAs(pattern=None):
            return ast.Constant(True)
        case ast.MatchValue(value=value):
            return ast.Compare(subject, [ast.Eq()], [value])
        case ast.MatchOr(patterns=patterns):
            tests = [make_pattern_test(subject, inner) for inner in patterns]
            if None not in tests:
                return ast.BoolOp(ast.Or(), [test for test in tests if test is not None])
        case ast.MatchSequence(patterns=patterns) if isinstance(subject, ast.Tuple):
            pairs = zip(subject.elts, patterns, strict=False)
            tests = [make_pattern_test(element, inner) for element, inner in pairs]
            if None not in tests:
                return ast.BoolOp(ast.And(), [test for test in tests if test is not None])
    return None
