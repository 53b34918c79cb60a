"""Recognises the training framework of a file or a launch, by signs that no other framework has.

    recognise_file(document)           # a program by its imports, a configuration by its settings
    recognise_launch(launch)           # `python examples/run_grpo.py policy.precision=...` is NeMo RL
    recognise_first_launch(launches)   # the framework of the first launch that has one

A sign is an import, a started program, a launcher, the path of a class, or settings that only the
framework has. A part of a word is never a sign. `framework_signs.yaml` has the signs of each
framework, and states whether its files are read, by `check` or by `convert`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import PurePosixPath
from shlex import quote
from typing import TYPE_CHECKING, Any

from bridge.read.foreign.document_signs import DocumentSign
from bridge.read.foreign.row_files import load_rows

if TYPE_CHECKING:
    from bridge.read.launch.launch import Launch
    from bridge.read.text.document import Document

SIGNS_FOLDER = files("bridge.read")
"""The folder of framework_signs.yaml."""
TARGET_KEY = "_target_"
"""Key of a mapping that names a class."""
MAX_DEPTH = 8
"""Levels of nested mappings in which the path of a class is looked for."""
CONVERTIBLE_MESSAGE = (
    "{path}: looks like {name} (it {evidence}), which {runs}. `check`, `plan` and `memory` do not read it; "
    "`precision-bridge convert {quoted}` reads what it states of the precision."
)
READABLE_MESSAGE = (
    "{path}: looks like {name} (it {evidence}), which {runs}. `check`, `plan` and `memory` read it, and `convert` does "
    "not."
)
UNREADABLE_MESSAGE = "{path}: looks like {name} (it {evidence}), which {runs}. No command reads it, `convert` neither."


@dataclass(frozen=True, kw_only=True)
class Framework:
    """The framework of a file or a launch, and how it was recognised."""

    name: str
    evidence: str
    """The sign, as a clause after "it": "imports `nemo_rl`"."""
    runs: str
    """The engine of its runs, as a clause after "which": "trains on Megatron Core"."""
    is_converted: bool = False
    """Whether `convert` reads the precision that the file states."""
    is_fallback: bool = False
    """Whether its launcher also starts programs of others. It is then named only if no system reads
    the command line."""
    is_read: bool = False
    """Whether `check`, `plan` and `memory` read the file."""
    table: str = ""
    """The table in `bridge.read.framework.tables` of launches with Megatron-LM's arguments; empty: none."""
    tree: str = ""
    """The table in `bridge.read.framework.tables` of settings of its own, in YAML files and launches.

    Empty: they are not read.
    """

    def refusal(self, path: str) -> str:
        """Return the message of a command that does not read the file.

        Args:
            path: The file.
        """
        template = UNREADABLE_MESSAGE
        if self.is_read or self.tree:
            template = READABLE_MESSAGE
        elif self.is_converted:
            template = CONVERTIBLE_MESSAGE
        return template.format(
            path=path, quoted=quote(path), name=self.name, evidence=self.evidence, runs=self.runs
        )


class _FileSign:
    """One row of `files`: the settings by which a YAML, JSON or TOML file is recognised.

    Its other columns replace those of the framework for such a file.
    """

    RUN_COLUMNS = ("runs", "converts", "reads", "tree")
    """Columns about the run of the file, which are no signs."""

    def __init__(self, columns: Mapping[str, Any], framework: _FrameworkSigns) -> None:
        self.runs: str = columns.get("runs", framework.runs)
        self.is_converted: bool = columns.get("converts", framework.is_converted)
        self.is_read: bool = columns.get("reads", False)
        self.tree: str = columns.get("tree", framework.tree)
        signs = {name: value for name, value in columns.items() if name not in self.RUN_COLUMNS}
        self.sign = DocumentSign({**signs, "certainty": 1.0})


class _FrameworkSigns:
    """The signs of one framework: a row of `framework_signs.yaml` with its patterns compiled."""

    def __init__(self, name: str, columns: Mapping[str, Any]) -> None:
        self.name = name
        self.runs: str = columns["runs"]
        self.is_converted: bool = columns.get("converts", False)
        self.shown_options = _split_column(columns, "shows")
        self.is_fallback: bool = columns.get("fallback", False)
        self.table: str = columns.get("table", "")
        self.tree: str = columns.get("tree", "")
        self.needed_word = _compile_column(columns, "words")
        self.modules = _split_column(columns, "modules")
        self.classes = self.modules
        if "classes" in columns:
            self.classes = _split_column(columns, "classes")
        self.launchers = _split_column(columns, "launchers")
        self.programs = _compile_column(columns, "programs", template=r"(?:{})\Z")
        self.needed_argument = _compile_column(columns, "with")
        self.overrides = _compile_column(columns, "overrides")
        self.files = [_FileSign(row, self) for row in columns.get("files", ())]

    def make_framework(self, evidence: str) -> Framework:
        """Return the framework, with the sign by which it was recognised."""
        return Framework(
            name=self.name,
            evidence=evidence,
            runs=self.runs,
            is_converted=self.is_converted,
            is_fallback=self.is_fallback,
            table=self.table,
            tree=self.tree,
        )

    def match_launch(self, launch: Launch) -> Framework | None:
        """Return the framework if a launch has a sign of it, else None."""
        if not self._has_needed_word(launch):
            return None
        evidence = (
            self._find_launcher_evidence(launch)
            or self._find_program_evidence(launch)
            or self._find_override_evidence(launch)
        )
        if not evidence:
            return None
        return self.make_framework(evidence)

    def _has_needed_word(self, launch: Launch) -> bool:
        """Return whether a launch has a word that the framework needs next to a sign, if any."""
        if self.needed_word is None:
            return True
        return any(self.needed_word.search(word) for word in _list_launch_texts(launch))

    def _find_launcher_evidence(self, launch: Launch) -> str:
        """Return the clause about a launcher of the framework; empty without one."""
        for word in launch.runner:
            name = PurePosixPath(word).name
            if name in self.launchers:
                return f"starts with `{name}`"
        return ""

    def _find_program_evidence(self, launch: Launch) -> str:
        """Return the clause about a program or a module of the framework; empty without one."""
        if self.programs is not None:
            match = self.programs.search(launch.program)
            if match is not None and self._has_needed_argument(launch):
                command = _format_command(match[0].lstrip("/"), launch, self.shown_options)
                return f"starts `{command}`"
        if _find_package(launch.program, self.modules):
            return f"starts `{launch.program}`"
        return ""

    def _has_needed_argument(self, launch: Launch) -> bool:
        """Return whether a program has an argument that the framework needs, if any."""
        if self.needed_argument is None:
            return True
        return any(self.needed_argument.fullmatch(word) for word in launch.arguments)

    def _find_override_evidence(self, launch: Launch) -> str:
        """Return the clause about an argument that only the framework takes; empty without one."""
        if self.overrides is None:
            return ""
        for word in launch.arguments:
            if not self.overrides.fullmatch(word):
                continue
            name = word.partition("=")[0].lstrip("+")
            if name.startswith("--"):
                return f"has `{name}`, an option of its programs"
            return f"has `{name}`, an override of its configuration"
        return ""

    def match_settings(self, document: Document, classes: Sequence[str]) -> Framework | None:
        """Return the framework if a document has its settings, or names a class of it, else None.

        Args:
            classes: The paths of the classes that it names.
        """
        for file in self.files:
            recognised = file.sign.recognise(document)
            if recognised is not None:
                return replace(
                    self.make_framework(recognised.evidence),
                    runs=file.runs,
                    is_converted=file.is_converted,
                    is_read=file.is_read,
                    tree=file.tree,
                )
        for path in classes:
            if _find_package(path, self.classes):
                return replace(self.make_framework(f"names the class `{path}`"), tree="")
        return None

    def match_imports(self, modules: Sequence[str]) -> Framework | None:
        """Return the framework if a program imports a package of it, else None."""
        for module in modules:
            package = _find_package(module, self.modules)
            if package:
                return replace(self.make_framework(f"imports `{package}`"), tree="")
        return None


def _split_column(columns: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the words of a column; none for an absent column."""
    return tuple(str(columns.get(name, "")).split())


def _compile_column(
    columns: Mapping[str, Any], name: str, template: str = "{}"
) -> re.Pattern[str] | None:
    """Return the compiled pattern of a column; None for an absent column.

    Args:
        columns: The row.
        name: The column.
        template: A pattern with braces, which the pattern of the column replaces.
    """
    if name not in columns:
        return None
    return re.compile(template.format(columns[name]))


def _list_launch_texts(launch: Launch) -> Iterator[str]:
    """Yield the program and arguments of a launch, its variables' values and the notes of its script."""
    yield launch.program
    yield from launch.arguments
    yield from launch.environment.values()
    yield from map(str, launch.notes)


def _find_package(path: str, packages: Sequence[str]) -> str:
    """Return the package that a dotted path is in, or is; empty if it is in none of them."""
    for package in packages:
        if path == package or path.startswith(f"{package}."):
            return package
    return ""


def _format_command(name: str, launch: Launch, shown_options: Sequence[str]) -> str:
    """Return the command as people know it: "train.py --algo grpo" or "swift sft".

    Args:
        name: The program.
        shown_options: Options that tell what the program does. The first one is shown.
    """
    for index, word in enumerate(launch.arguments):
        option, equals, value = word.partition("=")
        if option in shown_options:
            if not equals:
                value = "".join(launch.arguments[index + 1 : index + 2])
            return f"{name} {option} {value}"
    if name.endswith(".py") or not launch.arguments or launch.arguments[0].startswith("-"):
        return name
    return f"{name} {launch.arguments[0]}"


@cache
def _load_frameworks() -> tuple[_FrameworkSigns, ...]:
    """Return the signs of every framework, in the order of the table."""
    table = load_rows("framework_signs", SIGNS_FOLDER)["frameworks"]
    return tuple(_FrameworkSigns(name, columns) for name, columns in table.items())


def recognise_file(document: Document) -> Framework | None:
    """Return the framework of a file; None if no framework has its signs.

    A launch script has none of these signs: its launches are recognised one by one.
    """
    if document.kind == "python":
        modules = list_imported_modules(document.text)
        for signs in _load_frameworks():
            framework = signs.match_imports(modules)
            if framework is not None:
                return framework
        return None
    classes = list(dict.fromkeys(list_class_paths(document.mapping)))
    for signs in _load_frameworks():
        framework = signs.match_settings(document, classes)
        if framework is not None:
            return framework
    return None


def recognise_launch(launch: Launch) -> Framework | None:
    """Return the framework that a launch starts; None if no framework has its signs."""
    for signs in _load_frameworks():
        framework = signs.match_launch(launch)
        if framework is not None:
            return framework
    return None


def recognise_first_launch(launches: Iterable[Launch]) -> Framework | None:
    """Return the framework of the first launch that has one; None if none has."""
    for launch in launches:
        framework = recognise_launch(launch)
        if framework is not None:
            return framework
    return None


@lru_cache(maxsize=16)
def list_imported_modules(text: str) -> tuple[str, ...]:
    """Return the modules that a Python program imports, in order; none if it cannot be parsed."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        return ()
    modules: dict[str, None] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules[alias.name] = None
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules[node.module] = None
    return tuple(modules)


def list_class_paths(value: object, depth: int = MAX_DEPTH) -> Iterator[str]:
    """Yield the paths of classes that a configuration names in `_target_`, the outer ones first.

    Args:
        value: The configuration, or a value in it.
        depth: Levels of nested mappings that are searched.
    """
    if not depth:
        return
    if isinstance(value, Mapping):
        target = value.get(TARGET_KEY)
        if isinstance(target, str):
            yield target
        for inner in value.values():
            yield from list_class_paths(inner, depth - 1)
    elif isinstance(value, list):
        for inner in value:
            yield from list_class_paths(inner, depth - 1)
