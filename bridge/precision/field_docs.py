"""The sentence below each field of a config class, for `explain` and the reference page."""

import ast
import dataclasses
import functools
import inspect
import textwrap
from typing import NamedTuple


class FieldDoc(NamedTuple):
    """A documented field, as its class is written."""

    name: str
    annotation: str
    text: str


@functools.cache
def _fields(cls: type) -> tuple[FieldDoc, ...]:
    found = [field for base in cls.__bases__ if dataclasses.is_dataclass(base) for field in _fields(base)]
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    if not isinstance(body, ast.ClassDef):
        return tuple(found)
    for node, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and _is_text(below):
            text = inspect.cleandoc(ast.literal_eval(below.value))  # type: ignore[attr-defined]
            found.append(FieldDoc(node.target.id, ast.unparse(node.annotation), " ".join(text.split())))
    return tuple(found)


def field_docs(cls: type) -> dict[str, str]:
    """Return field -> the string literal written below it in the source of `cls`."""
    return {field.name: field.text for field in _fields(cls)}


def field_types(cls: type) -> dict[str, str]:
    """Return field -> its annotation as written, for the documented fields of `cls`."""
    return {field.name: field.annotation for field in _fields(cls)}


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
