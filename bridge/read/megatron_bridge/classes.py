"""`collect_declared_fields` and `find_method`: the fields and methods of classes whose source is found."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bridge.read.megatron_bridge.source_library import Library, Module
from bridge.read.megatron_bridge.values import Class, Function, ImportedName


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredField:
    """A field of a dataclass as its class declares it."""

    module: Module
    node: ast.AnnAssign


def collect_declared_fields(library: Library, kind: str) -> Mapping[str, DeclaredField]:
    """Return the fields that a class and its bases declare, those of the bases first.

    A class without source declares none.

    Args:
        library: The source of Megatron Bridge.
        kind: Import path of the class.
    """
    fields: dict[str, DeclaredField] = {}
    for owner_class in reversed(list(_iterate_class_and_bases(library, kind))):
        for node in owner_class.node.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                fields[node.target.id] = DeclaredField(module=owner_class.module, node=node)
    return fields


def find_method(library: Library, kind: str, name: str) -> Function | None:
    """Return a method of a class or of its bases; None if no class with source has it.

    Args:
        library: The source of Megatron Bridge.
        kind: Import path of the class.
        name: Name of the method.
    """
    for owner_class in _iterate_class_and_bases(library, kind):
        for node in owner_class.node.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return Function(module=owner_class.module, node=node)
    return None


def _iterate_class_and_bases(
    library: Library, kind: str, seen: tuple[str, ...] = ()
) -> Iterator[Class]:
    """Yield a class and its bases, the class first.

    Args:
        library: The source of Megatron Bridge.
        kind: Import path of the class.
        seen: Import paths of the classes on the way to it. They end a cycle of names, which broken
            source may have.
    """
    if not kind or kind in seen:
        return
    resolved_class = library.find(kind)
    if not isinstance(resolved_class, Class):
        return
    yield resolved_class
    for base in resolved_class.node.bases:
        if not isinstance(base, ast.Name):
            continue
        resolved_base = library.resolve_name(resolved_class.module, base.id)
        if isinstance(resolved_base, Class | ImportedName):
            yield from _iterate_class_and_bases(library, resolved_base.path, (*seen, kind))
