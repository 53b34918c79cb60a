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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGES = ("megatron", "transformer_engine")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """Where an error was raised, and the settings that its condition reads."""

    where: str = ""
    """File and line within its package: "megatron/core/transformer/transformer_config.py:1088"."""
    fields: tuple[str, ...] = ()
    """section.field of each setting, in order of reading."""


def first_of(error: BaseException) -> BaseException:
    """Return the error that an error was raised from: Megatron's own, where one of ours reports it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def cause_of(error: BaseException, sections: Mapping[str, Mapping[str, Any]]) -> Cause:
    """Return the cause of an error; both parts are empty for one of another package."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _place(frame.filename)]
    where = f"{_place(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    for frame in reversed(frames):
        for names in _conditions(frame.filename, frame.lineno or 0):
            fields = [f"{section}.{name}" for name in names for section in sections if name in sections[section]]
            if fields:
                return Cause(where=where, fields=tuple(fields))
    return Cause(where=where)


def _place(file: str) -> str:
    """Return a file's path from its package on, empty for a file of another package."""
    parts = Path(file).parts
    starts = [place for place, part in enumerate(parts) if part in PACKAGES and parts[place - 1] != "bridge"]
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
        if isinstance(node, ast.If | ast.Assert) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    for holder in sorted(around, key=lambda node: -node.lineno):
        attributes = [node.attr for node in ast.walk(holder.test) if isinstance(node, ast.Attribute)]
        yield list(dict.fromkeys(attributes))
