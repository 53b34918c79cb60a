"""Write `bridge/read/megatron_lm/known_arguments.json`: the arguments that Megatron-LM's parser has.

    python scripts/write_megatron_arguments.py "0.16.1=FOLDER" "0.19.0=FOLDER" "main of 2026-08-22=FOLDER"

Each argument names a release and the folder of its sources, which are parsed and never imported. An argument is known
by its name without dashes: those of `add_argument`, and the fields of the classes that `ArgumentGroupFactory` makes
arguments of, also behind ``no_`` and ``disable_`` where a field is a switch.
"""

from __future__ import annotations

import ast
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "bridge" / "read" / "megatron_lm" / "known_arguments.json"
PARSER = "megatron/training"
FACTORY = "ArgumentGroupFactory"


def main(words: list[str]) -> int:
    """Write the file; returns the exit code."""
    if not words:
        print(__doc__)
        return 2
    releases: list[str] = []
    known: set[str] = set()
    for word in words:
        release, folder = word.split("=", 1)
        arguments = set(arguments_of(Path(folder)))
        print(f"{release}: {len(arguments)} arguments, {len(arguments - known)} of them new")
        releases.append(release)
        known |= arguments
    rows = textwrap.wrap(json.dumps(sorted(known))[1:-1], 118, break_on_hyphens=False)
    lines = "\n  ".join(rows)
    FILE.write_text(f'{{\n "releases": {json.dumps(releases)},\n "arguments": [\n  {lines}\n ]\n}}\n', encoding="utf-8")
    return 0


def arguments_of(folder: Path) -> Iterator[str]:
    """Yield the arguments of a release, some of them several times."""
    classes = _classes(folder)
    for path in sorted((folder / PARSER).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            function = ast.unparse(node.func).rpartition(".")[2]
            if function == "add_argument":
                yield from _options(node)
            elif function == FACTORY and node.args:
                yield from _fields(classes, ast.unparse(node.args[0]))


def _options(node: ast.AST) -> Iterator[str]:
    """Yield the names of the options among the constants of a node."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.startswith("--"):
            name = part.value.lstrip("-").replace("-", "_")
            if name.isidentifier():
                yield name


def _classes(folder: Path) -> dict[str, list[ast.ClassDef]]:
    """Return the classes of a release by name; several modules may have a class of the same name."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for path in sorted((folder / "megatron").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)
    return classes


def _fields(classes: dict[str, list[ast.ClassDef]], name: str) -> Iterator[str]:
    """Yield the arguments that Megatron makes of the fields of a config class."""
    for node in classes.get(name.rpartition(".")[2], ()):
        for base in node.bases:
            yield from _fields(classes, ast.unparse(base))
        for field in node.body:
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            yield field.target.id
            if field.value is None:
                continue
            yield from _options(field.value)
            is_on = ast.unparse(field.annotation) == "bool" and "True" in ast.unparse(field.value)
            if is_on:
                yield f"no_{field.target.id}"
                yield f"disable_{field.target.id}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
