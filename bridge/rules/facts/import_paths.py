"""`find_import_fault`: the fault of an import path, found without importing its module."""

from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from symtable import symtable

from bridge.errors import close_matches, listed

GPU_ONLY_PACKAGE = "transformer_engine"
"""The package whose factories are missing on every machine without a GPU."""


def find_import_fault(path: str) -> str | None:
    """Return why an import path (package.module.function) is wrong, or None if it is right.

    A module without Python source counts as having the name.
    """
    *packages, name = path.split(".")
    if not packages or not all(part.isidentifier() for part in (*packages, name)):
        return "it is no import path such as package.module.function"
    spec = _find_module_spec(packages)
    if spec is None:
        if packages[0] == GPU_ONLY_PACKAGE:
            return None
        return f"there is no module {'.'.join(packages)!r}"
    names = _list_bound_names(spec)
    if names is None or name in names:
        return None
    reason = f"module {'.'.join(packages)!r} has no {name!r}"
    near = close_matches(name, names)
    if near:
        reason += f" (did you mean {listed(near)}?)"
    return reason


def _find_module_spec(packages: list[str]) -> ModuleSpec | None:
    """Return the spec of a module without importing its packages, or None if there is none."""
    module = packages[0]
    spec = find_spec(module)
    for part in packages[1:]:
        if spec is None or spec.submodule_search_locations is None:
            return None
        module = f"{module}.{part}"
        spec = PathFinder.find_spec(module, spec.submodule_search_locations)
    return spec


def _list_bound_names(spec: ModuleSpec) -> set[str] | None:
    """Return the names that a module binds, or None if they are not known."""
    source = getattr(spec.loader, "get_source", lambda _: None)(spec.name)
    if source is None or "import *" in source:
        return None
    try:
        symbols = symtable(source, spec.name, "exec").get_symbols()
    except SyntaxError:
        return set()
    names = set()
    for symbol in symbols:
        if symbol.is_assigned() or symbol.is_imported():
            names.add(symbol.get_name())
    return names
