"""The settings behind an error of Megatron Core or Transformer Engine, by its condition.

An error's text is for people; the condition that raised it is code, and names the fields, as in
``if self.num_layers % self.pipeline_model_parallel_size: raise``. So the source of the frames of
these two packages is parsed, from the innermost outwards, and the attributes in a condition around
the failing line that are fields of the configs are the answer.
"""

import ast
import linecache
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TRACED_PACKAGES = ("megatron", "transformer_engine")


def find_root_error(error: BaseException) -> BaseException:
    """Return the error that an error was raised from: Megatron's, where ours reports it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def find_cause(
    error: BaseException, sections: Mapping[str, Mapping[str, Any]]
) -> tuple[str, list[str]]:
    """Return where an error was raised, and section.field of each setting in its condition.

    The settings stand in the order in which the condition reads them. The place is a file and a
    line within its package: "megatron/core/transformer/transformer_config.py:1088". Both
    are empty for an error of another package.
    """
    frames = []
    for frame in traceback.extract_tb(error.__traceback__):
        if _get_package_path(frame.filename):
            frames.append(frame)
    if not frames:
        return "", []
    last = frames[-1]
    where = f"{_get_package_path(last.filename)}:{last.lineno}"
    for frame in reversed(frames):
        for names in _find_conditions(frame.filename, frame.lineno or 0):
            fields = _find_fields(names, sections)
            if fields:
                return where, fields
    return where, []


def _find_fields(names: list[str], sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return section.field of each name that is a field of a section."""
    fields = []
    for name in names:
        for section, values in sections.items():
            if name in values:
                fields.append(f"{section}.{name}")
    return fields


def _get_package_path(file: str) -> str:
    """Return a file's path from its package on, empty for a file of another package."""
    parts = Path(file).parts
    for place, part in enumerate(parts):
        if part in TRACED_PACKAGES and parts[place - 1] != "bridge":
            return "/".join(parts[place:])
    return ""


def _find_conditions(file: str, line: int) -> Iterator[list[str]]:
    """Yield the attributes that each condition around a line reads, the innermost first."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return
    around = []
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.Assert):
            last = node.end_lineno or node.lineno
            if node.lineno <= line <= last:
                around.append(node)
    for condition in sorted(around, key=lambda node: -node.lineno):
        names: dict[str, None] = {}
        for node in ast.walk(condition.test):
            if isinstance(node, ast.Attribute):
                names[node.attr] = None
        yield list(names)
