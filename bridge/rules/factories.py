"""Whether the import path of a quantizer factory leads to a name of a module here, without running the module."""

import ast
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec

from bridge.errors import close_matches, listed

ELSEWHERE = "transformer_engine"
"""The package of factories that are missing on every machine without a GPU."""


def why_not_found(path: str) -> str | None:
    """Return why an import path, package.module.function, leads nowhere; None where it leads to a name of a module.

    A module without Python source counts as having the name.
    """
    *packages, name = path.split(".")
    if not packages or not all(part.isidentifier() for part in (*packages, name)):
        return "it is no import path such as package.module.function"
    module = packages[0]
    spec = find_spec(module)
    for part in packages[1:]:
        places = spec.submodule_search_locations if spec is not None else None
        if places is None:
            break
        module = f"{module}.{part}"
        spec = PathFinder.find_spec(module, places)
    if spec is None or module != ".".join(packages):
        return None if packages[0] == ELSEWHERE else f"there is no module {'.'.join(packages)!r}"
    names = _names_of(spec)
    if names is None or name in names:
        return None
    near = close_matches(name, names)
    return f"module {module!r} has no {name!r}" + (f" (did you mean {listed(near)}?)" if near else "")


def _names_of(spec: ModuleSpec) -> set[str] | None:
    """Return the names that a module binds; None where that is not known."""
    source = getattr(spec.loader, "get_source", lambda _: None)(spec.name)
    try:
        names = {*_names(ast.parse(source))} if source is not None else {"*"}
    except SyntaxError:
        return set()
    return None if "*" in names else names


def _names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module binds outside of functions and classes; "*" for an import of all names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        else:
            yield from _names(node)
