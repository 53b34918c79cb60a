"""Frameworks that start runs and whose files are not read: each is known by a sign, and named in one sentence.

`rows/frameworks.yaml` has a row for each. A sign is an import, a started program, a launcher, the path of a class, or
settings that only the framework has; no sign is a part of a word.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import PurePosixPath
from shlex import quote
from typing import TYPE_CHECKING, Any

from bridge.read.table import Table, rows

if TYPE_CHECKING:
    from bridge.read.launch.launches import Launch
    from bridge.read.text.document import Document

TARGET = "_target_"
DEEPEST = 8
"""Mappings within each other in which the path of a class is looked for."""
CONVERTED = (
    "{path}: looks like {name} (it {evidence}), which {runs}. `check`, `plan` and `memory` do not read it; "
    "`precision-bridge convert {quoted}` reads what it states of the precision."
)
READ = (
    "{path}: looks like {name} (it {evidence}), which {runs}. `check`, `plan` and `memory` read it, and `convert` does "
    "not."
)
UNREAD = "{path}: looks like {name} (it {evidence}), which {runs}. No command reads it, `convert` neither."


@dataclass(frozen=True, kw_only=True)
class Framework:
    """One framework that a file is known to be of."""

    name: str
    evidence: str
    """The sign, as a clause behind "it"."""
    runs: str
    """What a run of it trains on, as a clause behind "which"."""
    is_converted: bool = False
    """`convert` reads what the file states of the precision."""
    yields: bool = False
    """A system that reads the command line goes before it."""
    is_read: bool = False
    """`check`, `plan` and `memory` read the file."""
    table: str = ""
    """Its table in `bridge.read.framework`, by which its runs are read; empty: they are not."""

    tree: str = ""
    """Its table there, by which files with settings of its own are read; empty: they are not."""

    def refusal(self, path: str) -> str:
        """Return the sentences with which every command that does not read the file refuses it."""
        sentence = UNREAD
        if self.is_read or self.tree:
            sentence = READ
        elif self.is_converted:
            sentence = CONVERTED
        words = {"name": self.name, "evidence": self.evidence, "runs": self.runs}
        return sentence.format(path=path, quoted=quote(path), **words)


class _Row:
    """One row of the table, its patterns compiled."""

    def __init__(self, name: str, columns: Mapping[str, Any]) -> None:
        self.name = name
        self.runs: str = columns["runs"]
        self.is_converted: bool = columns.get("converts", False)
        self.shown = tuple(str(columns.get("shows", "")).split())
        self.yields: bool = columns.get("yields", False)
        self.table: str = columns.get("table", "")
        self.tree: str = columns.get("tree", "")
        self.words = _pattern(columns, "words")
        self.modules = tuple(str(columns.get("modules", "")).split())
        self.classes = tuple(str(columns.get("classes", columns.get("modules", ""))).split())
        self.launchers = tuple(str(columns.get("launchers", "")).split())
        self.programs = (
            re.compile(rf"(?:{columns['programs']})\Z") if "programs" in columns else None
        )
        self.needed = _pattern(columns, "with")
        self.overrides = _pattern(columns, "overrides")
        self.files = [_File(row, self) for row in columns.get("files", ())]

    def found(self, evidence: str) -> Framework:
        return Framework(
            name=self.name,
            evidence=evidence,
            runs=self.runs,
            is_converted=self.is_converted,
            yields=self.yields,
            table=self.table,
            tree=self.tree,
        )

    def of_launch(self, launch: Launch) -> Framework | None:
        """Return the framework where a launch is one of its own."""
        if self.words is not None and not any(
            self.words.search(word) for word in _words_of(launch)
        ):
            return None
        launcher = [word for word in launch.runner if PurePosixPath(word).name in self.launchers]
        if launcher:
            return self.found(f"starts with `{PurePosixPath(launcher[0]).name}`")
        program, arguments = launch.program, launch.arguments
        named = self.programs.search(program) if self.programs is not None else None
        is_complete = self.needed is None or any(self.needed.fullmatch(word) for word in arguments)
        if named is not None and is_complete:
            command = _command_of(named[0].lstrip("/"), launch, self.shown)
            return self.found(f"starts `{command}`")
        if _package_of(program, self.modules):
            return self.found(f"starts `{program}`")
        if self.overrides is not None:
            for word in arguments:
                if self.overrides.fullmatch(word):
                    name, what = (
                        word.partition("=")[0].lstrip("+"),
                        "an override of its configuration",
                    )
                    if name.startswith("--"):
                        what = "an option of its programs"
                    return self.found(f"has `{name}`, {what}")
        return None

    def of_settings(self, document: Document, targets: Sequence[str]) -> Framework | None:
        """Return the framework where the settings of a document are its own."""
        for file in self.files:
            seen = file.table.recognise(document)
            if seen is not None:
                found = self.found(seen.evidence)
                found = replace(found, runs=file.runs, is_converted=file.is_converted)
                return replace(found, is_read=file.is_read, tree=file.tree)
        for target in targets:
            if _package_of(target, self.classes):
                return replace(self.found(f"names the class `{target}`"), tree="")
        return None


def _words_of(launch: Launch) -> Iterator[str]:
    """Yield the words of a launch, those of its variables and the files that its script reads."""
    yield launch.program
    yield from launch.arguments
    yield from launch.environment.values()
    yield from launch.notes


def _package_of(path: str, packages: Sequence[str]) -> str:
    """Return the package in which a dotted path lies, or that it is; empty where none of them is it."""
    for package in packages:
        if path == package or path.startswith(f"{package}."):
            return package
    return ""


def _pattern(columns: Mapping[str, Any], name: str) -> re.Pattern[str] | None:
    return re.compile(columns[name]) if name in columns else None


class _File:
    """One row of `files`."""

    def __init__(self, columns: Mapping[str, Any], framework: _Row) -> None:
        self.runs: str = columns.get("runs", framework.runs)
        self.is_converted: bool = columns.get("converts", framework.is_converted)
        self.is_read: bool = columns.get("reads", False)
        self.tree: str = columns.get("tree", framework.tree)
        others = ("runs", "converts", "reads", "tree")
        signs = {name: value for name, value in columns.items() if name not in others}
        self.table = Table({"recognised": [{**signs, "certainty": 1.0}]})


def _command_of(name: str, launch: Launch, shown: Sequence[str]) -> str:
    """Return the command as it is known: a program with an option that is shown, or a command with what it is to do."""
    for place, word in enumerate(launch.arguments):
        option, equals, value = word.partition("=")
        if option in shown:
            value = value if equals else "".join(launch.arguments[place + 1 : place + 2])
            return f"{name} {option} {value}"
    if name.endswith(".py") or not launch.arguments or launch.arguments[0].startswith("-"):
        return name
    return f"{name} {launch.arguments[0]}"


@cache
def _rows() -> tuple[_Row, ...]:
    return tuple(_Row(name, columns) for name, columns in rows("frameworks")["frameworks"].items())


def recognise(document: Document) -> Framework | None:
    """Return the framework whose file a document is; None for a launch script, which may start several programs."""
    if document.kind == "python":
        return _of_imports(imports_of(document.text))
    targets = list(dict.fromkeys(classes_in(document.mapping)))
    for row in _rows():
        found = row.of_settings(document, targets)
        if found is not None:
            return found
    return None


def of_launch(launch: Launch) -> Framework | None:
    """Return the framework of which a launch is a start."""
    for row in _rows():
        found = row.of_launch(launch)
        if found is not None:
            return found
    return None


def of_launches(launches: Iterable[Launch]) -> Framework | None:
    """Return the framework of the first launch that has one."""
    for launch in launches:
        found = of_launch(launch)
        if found is not None:
            return found
    return None


def _of_imports(imports: Sequence[str]) -> Framework | None:
    for row in _rows():
        for module in imports:
            package = _package_of(module, row.modules)
            if package:
                return replace(row.found(f"imports `{package}`"), tree="")
    return None


@lru_cache(maxsize=16)
def imports_of(text: str) -> tuple[str, ...]:
    """Return the modules that a Python program imports, in order; none where it is no Python."""
    try:
        tree = ast.parse(text)
        nodes = list(ast.walk(tree))
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        return ()
    found: dict[str, None] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(dict.fromkeys(alias.name for alias in node.names))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found[node.module] = None
    return tuple(found)


def classes_in(value: object, depth: int = DEEPEST) -> Iterator[str]:
    """Yield the paths of classes that a configuration names, the outer ones first."""
    if not depth:
        return
    if isinstance(value, Mapping):
        target = value.get(TARGET)
        if isinstance(target, str):
            yield target
        for inner in value.values():
            yield from classes_in(inner, depth - 1)
    elif isinstance(value, list):
        for inner in value:
            yield from classes_in(inner, depth - 1)
