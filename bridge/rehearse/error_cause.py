"""The settings that caused an error of Megatron Core or Transformer Engine.

The text of an error often names no field. The condition that raised it does, as in
``if self.num_layers % self.pipeline_model_parallel_size: raise``. So the source of the traceback's
frames in these two packages is parsed, from the innermost frame outwards. The attributes that a
condition around the failing line reads are compared with the fields of the configs.
"""

import ast
import linecache
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TRACED_PACKAGES = ("megatron", "transformer_engine")
"""Packages whose frames are parsed."""
BRIDGE_FOLDER = Path(__file__).parents[1]
"""Folder of this project, which has a folder named megatron too."""


def find_root_error(error: BaseException) -> BaseException:
    """Return the first error of a chain of causes.

    If an error of this project was raised from an error of Megatron, this is Megatron's error.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def find_cause(
    error: BaseException, sections: Mapping[str, Mapping[str, Any]]
) -> tuple[str, list[str]]:
    """Return the line that raised an error, and section.field of each setting in its condition.

    Args:
        error: The error, with its traceback.
        sections: Section -> field -> value of the configs.

    Returns:
        The file within its package and the line, as in
        "megatron/core/transformer/transformer_config.py:1088"; and the settings in the order in
        which the condition reads them. Both are empty for an error of another package.
    """
    frames = []
    for frame in traceback.extract_tb(error.__traceback__):
        if _get_package_path(frame.filename):
            frames.append(frame)
    if not frames:
        return "", []
    innermost = frames[-1]
    location = f"{_get_package_path(innermost.filename)}:{innermost.lineno}"
    for frame in reversed(frames):
        for attributes in _iterate_conditions(frame.filename, frame.lineno or 0):
            fields = _find_fields(attributes, sections)
            if fields:
                return location, fields
    return location, []


def _find_fields(attributes: list[str], sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return section.field of each attribute that is a field of a section."""
    fields = []
    for name in attributes:
        for section, values in sections.items():
            if name in values:
                fields.append(f"{section}.{name}")
    return fields


def _get_package_path(file: str) -> str:
    """Return a file's path from its package on, or "" for a file of another package."""
    if Path(file).is_relative_to(BRIDGE_FOLDER):
        return ""
    parts = Path(file).parts
    for index, part in enumerate(parts):
        if part in TRACED_PACKAGES:
            return "/".join(parts[index:])
    return ""


def _iterate_conditions(file: str, line: int) -> Iterator[list[str]]:
    """Yield the attributes that each condition around a line reads, innermost first."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return
    conditions = []
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.Assert):
            last_line = node.end_lineno or node.lineno
            if node.lineno <= line <= last_line:
                conditions.append(node)
    for condition in sorted(conditions, key=lambda node: -node.lineno):
        attributes: list[str] = []
        for node in ast.walk(condition.test):
            if isinstance(node, ast.Attribute) and node.attr not in attributes:
                attributes.append(node.attr)
        yield attributes
