"""`read_field_docs`: the docstring of each field of a config class.

`explain` and the reference page show it.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
from typing import NamedTuple


class FieldDoc(NamedTuple):
    """A documented field, as its class is written."""

    annotation: str
    text: str


@functools.cache
def read_field_docs(cls: type) -> dict[str, FieldDoc]:
    """Return the annotation and the docstring of each field, by field name.

    They come from the source of `cls` and its bases. The docstring is the string literal below the
    field.
    """
    docs = {}
    for base in cls.__bases__:
        if dataclasses.is_dataclass(base):
            docs.update(read_field_docs(base))
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    for node, below in itertools.pairwise(body):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_text:
            docstring = inspect.cleandoc(below.value.value)
            annotation = ast.unparse(node.annotation).replace("DType", "torch.dtype | str")
            docs[node.target.id] = FieldDoc(annotation, " ".join(docstring.split()))
    return docs
