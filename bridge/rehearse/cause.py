"""The settings behind an error of Megatron Core or Transformer Engine, from the condition that raised it.

An error's text is for people; the condition that raised it is code, and names the fields, as in
``if self.num_layers % self.pipeline_model_parallel_size: raise``. So the source of the frames of these two packages is
parsed, from the innermost outwards, and the attributes in a condition around the failing line that are fields of the
configs are the answer.
"""

import ast
import linecache
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PACKAGES = ("megatron", "transformer_engine")


def first_of(error: BaseException) -> BaseException:
    """Return the error that an error was raised from: Megatron's own, where one of ours reports it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def cause_of(
    error: BaseException, sections: Mapping[str, Mapping[str, Any]]
) -> tuple[str, list[str]]:
    """Return where an error was raised, and section.field of each setting that its condition reads, in that order.

    The place is a file and a line within its package: "megatron/core/transformer/transformer_config.py:1088". Both
    are empty for an error of another package.
    """
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if _place(frame.filename)
    ]
    where = f"{_place(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    for frame in reversed(frames):
        for names in _conditions(frame.filename, frame.lineno or 0):
            fields = [
                f"{section}.{name}"
                for name in names
                for section in sections
                if name in sections[section]
            ]
            if fields:
                return where, fields
    return where, []


def _place(file: str) -> str:
    """Return a file's path from its package on, empty for a file of another package."""
    parts = Path(file).parts
    starts = [
        place
        for place, part in enumerate(parts)
        if part in PACKAGES and parts[place - 1] != "bridge"
    ]
    return "/".join(parts[starts[0] :]) if starts else ""


def _conditions(file: str, line: int) -> Iterator[list[str]]:
    """Yield the attributes that each condition around a line reads, the innermost condition first."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If | ast.Assert)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    for holder in sorted(around, key=lambda node: -node.lineno):
        yield list(
            dict.fromkeys(
                node.attr for node in ast.walk(holder.test) if isinstance(node, ast.Attribute)
            )
        )
