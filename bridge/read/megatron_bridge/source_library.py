"""`Library`: the source of Megatron Bridge in a checkout above a file, or the installed one.

    library = find_library(Path("examples/run.sh"))
    library.find("megatron.bridge.recipes.common._pretrain_common")   # the function, by its syntax
    library.recipe("llama32_1b_pretrain_config")

The source is parsed and never imported. A name is followed through the imports of its module. So a
name of a package's `__init__` is found in the file that defines it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from bridge.read.megatron_bridge.values import Class, Constant, Function, ImportedName, Value

PACKAGE = "megatron.bridge"
SOURCE_FOLDERS = ("src", "")
"""Folders of a checkout in which the package may lie."""
RECIPES_PACKAGE = f"{PACKAGE}.recipes"
BENCHMARKS_PACKAGE = f"{PACKAGE}.perf_recipes"
BENCHMARK_NAME = re.compile(
    r"_(?:pretrain|sft|peft)_(?P<gpus>[1-9]\d*)gpu_(?P<gpu>[a-z0-9]+)_"
    r"(?P<precision>bf16|fp8cs|fp8ds|fp8mx|fp8sc|nvfp4)(?:_[a-z0-9_]+)?_config\Z"
)
"""Name of a benchmark's recipe, which states the number and kind of GPUs.

Source: scripts/training/recipe_metadata.py."""
CHECKPOINT_CLASS = f"{PACKAGE}.models.conversion.auto_bridge.AutoBridge"
"""Class that makes a model of a Hugging Face checkpoint. Its methods are modelled, so that its large
source is not parsed."""
MAX_MODULE_BYTES = 512 * 1024
"""Largest file that is parsed."""
MAX_IMPORT_DEPTH = 12
"""Most modules through which one name is followed."""


class Module:
    """A Python file: its functions, classes, imports and constants, by name."""

    def __init__(self, tree: ast.Module, *, name: str, file: str, is_package: bool = False) -> None:
        self.tree = tree
        self.name = name
        """Import path; empty for a file of no package."""
        self.file = file
        """Name of the file in messages."""
        self._package = name
        """Import path of the package that relative imports start from."""
        if not is_package:
            self._package = name.rpartition(".")[0]
        self.imported: dict[str, str] = {}
        """Name -> import path."""
        self.starred: list[str] = []
        """Modules whose every name is imported by `*`."""
        self.defined: dict[str, ast.FunctionDef | ast.ClassDef] = {}
        """Name -> the function or class of the top level."""
        self.assigned: dict[str, list[ast.expr]] = {}
        """Name -> the expressions that the top level assigns to it."""
        self.values: dict[str, Value] = {}
        """Name -> the value of a constant that was evaluated."""
        for node in _iterate_top_level(tree.body):
            self._add(node)

    def _add(self, node: ast.stmt) -> None:
        """Add the names that a statement of the top level binds."""
        match node:
            case ast.Import() | ast.ImportFrom():
                self.imported.update(self.imports_of(node))
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                self.defined[name] = node
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.assigned.setdefault(name, []).append(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self.assigned.setdefault(name, []).append(value)

    def binds(self, name: str) -> bool:
        """Return whether the top level of the file gives a name a meaning."""
        return name in self.defined or name in self.assigned or name in self.imported

    def imports_of(self, node: ast.Import | ast.ImportFrom) -> dict[str, str]:
        """Return the names that an import binds, each with its import path.

        A module whose every name is imported by `*` is added to `starred`.
        """
        bound: dict[str, str] = {}
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    bound[alias.asname] = alias.name
                else:  # `import a.b` binds a
                    first = alias.name.partition(".")[0]
                    bound[first] = first
            return bound
        package = self._resolve_package(node)
        for alias in node.names:
            if alias.name == "*":
                self.starred.append(package)
            else:
                bound[alias.asname or alias.name] = f"{package}.{alias.name}"
        return bound

    def _resolve_package(self, node: ast.ImportFrom) -> str:
        """Return the import path of the module that names are imported from, also of a relative one."""
        package = node.module or ""
        if not node.level:
            return package
        parents = self._package.split(".")
        parents = parents[: len(parents) - node.level + 1]
        return ".".join(filter(None, (*parents, package)))


def _iterate_top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also those in its conditions and its `try` statements."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _iterate_top_level(node.body)
            yield from _iterate_top_level(node.orelse)
        elif isinstance(node, ast.Try):
            yield from _iterate_top_level(node.body)
            for handler in node.handlers:
                yield from _iterate_top_level(handler.body)


class Library:
    """The source of Megatron Bridge, and of another package whose recipes use it."""

    def __init__(self, root: Path | None, other_packages: Mapping[str, Path] | None = None) -> None:
        self.root = root
        """Folder with `megatron/bridge`; None if no source is found."""
        self._other_packages = other_packages or {}
        """Name of another package -> the folder that it lies in."""
        self._modules: dict[str, Module | None] = {}
        self._file: Module | None = None
        """The file that is being read."""

    def module(self, name: str) -> Module | None:
        """Return a module of the package by its import path; None if its source is not found."""
        if name not in self._modules:
            self._modules[name] = self._load_module(name)
        return self._modules[name]

    def _load_module(self, name: str) -> Module | None:
        """Return a module by its file, or by that of its package; None if there is none that can be parsed."""
        root = self._find_root(name)
        if root is None:
            return None
        base_path = root.joinpath(*name.split("."))
        for path in (base_path.with_suffix(".py"), base_path / "__init__.py"):
            if path.is_file() and path.stat().st_size <= MAX_MODULE_BYTES:
                try:
                    tree = ast.parse(path.read_text(encoding="utf-8"))
                except (SyntaxError, ValueError, RecursionError):
                    return None
                file = path.relative_to(root)
                if root == self.root:
                    file = path.relative_to(root / "megatron" / "bridge")
                is_package = path.name == "__init__.py"
                return Module(tree, name=name, file=str(file), is_package=is_package)
        return None

    def _find_root(self, name: str) -> Path | None:
        """Return the folder that the package of a module lies in; None if it is not found."""
        if f"{name}.".startswith(f"{PACKAGE}."):
            return self.root
        return self._other_packages.get(name.partition(".")[0])

    def make_module(self, path: Path, tree: ast.Module) -> Module:
        """Return the file that is being read as a module. It has an import path if it lies in the package.

        Args:
            path: Path of the file.
            tree: Its syntax tree.
        """
        name = ""
        resolved_path = path.resolve()
        if self.root is not None and resolved_path.is_relative_to(
            self.root / "megatron" / "bridge"
        ):
            name = ".".join(resolved_path.relative_to(self.root).with_suffix("").parts)
        is_package = path.name == "__init__.py"
        name = name.removesuffix(".__init__")
        module = Module(tree, name=name, file=path.name, is_package=is_package)
        self._file = module
        if name:
            self._modules[module.name] = module
        return module

    def sets_attribute(self, name: str) -> bool:
        """Return whether a recipe module that was read has a statement about an attribute."""
        for module in self._modules.values():
            if module is None or not module.name.startswith((RECIPES_PACKAGE, BENCHMARKS_PACKAGE)):
                continue
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Attribute) and node.attr == name:
                    return True
        return False

    def forget_values(self) -> None:
        """Forget the constants that were evaluated. A followed function may have changed their objects."""
        for module in (self._file, *self._modules.values()):
            if module is not None:
                module.values.clear()

    def find(self, path: str, depth: int = 0) -> Value:
        """Return the function, class or constant of an import path.

        It is an `ImportedName` if its source is not found.

        Args:
            path: The import path.
            depth: Number of imports that led to it.
        """
        holder, _, name = path.rpartition(".")
        module = None
        if holder and path != CHECKPOINT_CLASS:
            module = self.module(holder)
        if module is None or depth > MAX_IMPORT_DEPTH:
            return ImportedName(path)
        return self.resolve_name(module, name, depth)

    def resolve_name(self, module: Module, name: str, depth: int = 0) -> Value:
        """Return the function, class or constant that a name of a module is bound to.

        A constant is not evaluated. The result is an `ImportedName` if the source is not found.
        """
        defined = module.defined.get(name)
        if isinstance(defined, ast.FunctionDef):
            return Function(module=module, node=defined)
        if isinstance(defined, ast.ClassDef):
            return Class(module=module, node=defined)
        if name in module.assigned:
            return Constant(module=module, name=name)
        if name in module.imported:
            return self.find(module.imported[name], depth + 1)
        for package in module.starred:
            starred = self.find(f"{package}.{name}", depth + 1)
            if not isinstance(starred, ImportedName) or self.module(package) is None:
                return starred
        return ImportedName(f"{module.name}.{name}".lstrip("."))

    def recipe(self, name: str) -> Function | None:
        """Return the function of a recipe by its name; None if its source is not found.

        The modules are searched in the order of `run_recipe.py`.

        Source: NVIDIA-NeMo/Megatron-Bridge 067f987d scripts/training/recipe_runner.py: load_recipe.
        """
        modules = self._list_recipe_modules(name)
        if BENCHMARK_NAME.search(name):
            modules.sort(key=lambda module: not module.startswith(BENCHMARKS_PACKAGE))
        for module in modules:
            function = self.find(f"{module}.{name}")
            if isinstance(function, Function):
                return function
        return None

    def _list_recipe_modules(self, name: str) -> list[str]:
        """Return the recipe modules whose text has a name, those of the library before the benchmarks.

        Only these modules are parsed, since the packages have hundreds of them.
        """
        if self.root is None or not name.isidentifier():
            return []
        modules: list[str] = []
        for package in (RECIPES_PACKAGE, BENCHMARKS_PACKAGE):
            for path in sorted(self.root.joinpath(*package.split(".")).rglob("*.py")):
                if name in path.read_text(encoding="utf-8"):
                    relative_path = path.relative_to(self.root).with_suffix("")
                    modules.append(".".join(relative_path.parts).removesuffix(".__init__"))
        return modules


def find_library(path: Path) -> Library:
    """Return the library whose source lies in a folder above a file, or else the installed one."""
    for folder in path.resolve().parents:
        for source in SOURCE_FOLDERS:
            if has_package(folder / source):
                return Library(folder / source)
    return Library(find_installed_root())


def find_installed_root() -> Path | None:
    """Return the folder of the installed package of Megatron Bridge; None if it is not installed."""
    for entry in sys.path:
        if entry and has_package(Path(entry)):
            return Path(entry).resolve()
    return None


def has_package(folder: Path) -> bool:
    """Return whether the package of Megatron Bridge lies in a folder."""
    return (folder / "megatron" / "bridge" / "recipes").is_dir()
