"""Classes whose source is at hand: the fields that they declare, and their methods."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bridge.read.megatron_bridge.source_library import Library, Module
from bridge.read.megatron_bridge.values import Class, Function


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredField:
    """A field of a dataclass as its class declares it."""

    module: Module
    node: ast.AnnAssign


def collect_declared_fields(library: Library, kind: str) -> Mapping[str, DeclaredField]:
    """Return the fields that a class and its bases declare, those of the bases first.

    A base whose source is not at hand declares none.
    """
    fields: dict[str, DeclaredField] = {}
    for owner_class in reversed(list(_iterate_class_and_bases(library, kind))):
        for node in owner_class.node.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                fields[node.target.id] = DeclaredField(module=owner_class.module, node=node)
    return fields


def find_method(library: Library, kind: str, name: str) -> Function | None:
    """Return a method of a class or of its bases; None where no source at hand has it."""
    for owner_class in _iterate_class_and_bases(library, kind):
        for node in owner_class.node.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return Function(module=owner_class.module, node=node)
    return None


def _iterate_class_and_bases(
    library: Library, kind: str, seen: tuple[str, ...] = ()
) -> Iterator[Class]:
    """Yield a class and its bases, the class first."""
    resolved_class = library.find(kind) if kind else None
    if not isinstance(resolved_class, Class) or kind in seen:
        return
    yield resolved_class
    for base in resolved_class.node.bases:
        name = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(name, ast.Name):
            named = library.resolve_name(resolved_class.module, name.id)
            yield from _iterate_class_and_bases(
                library, str(getattr(named, "path", "")), (*seen, kind)
            )
