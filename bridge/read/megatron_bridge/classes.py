"""Classes whose source is at hand: the fields that they declare, and their methods."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bridge.read.megatron_bridge.library import Library, Module
from bridge.read.megatron_bridge.values import Class, Function


@dataclass(frozen=True, kw_only=True, slots=True)
class Declared:
    """A field of a dataclass as its class declares it."""

    module: Module
    node: ast.AnnAssign


def declared_fields(library: Library, kind: str) -> Mapping[str, Declared]:
    """Return the fields that a class and its bases declare, those of the bases first.

    A base whose source is not at hand declares none.
    """
    fields: dict[str, Declared] = {}
    for found in reversed(list(_classes(library, kind))):
        for node in found.node.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                fields[node.target.id] = Declared(module=found.module, node=node)
    return fields


def method_of(library: Library, kind: str, name: str) -> Function | None:
    """Return a method of a class or of its bases; None where no source at hand has it."""
    for found in _classes(library, kind):
        for node in found.node.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return Function(module=found.module, node=node)
    return None


def _classes(library: Library, kind: str, seen: tuple[str, ...] = ()) -> Iterator[Class]:
    """Yield a class and its bases, the class first."""
    found = library.find(kind) if kind else None
    if not isinstance(found, Class) or kind in seen:
        return
    yield found
    for base in found.node.bases:
        name = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(name, ast.Name):
            named = library.name_in(found.module, name.id)
            yield from _classes(library, str(getattr(named, "path", "")), (*seen, kind))
