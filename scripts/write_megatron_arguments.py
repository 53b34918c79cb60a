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
    releases, known = [], set[str]()
    for word in words:
        release, folder = word.split("=", 1)
        found = set(arguments_of(Path(folder)))
        print(f"{release}: {len(found)} arguments, {len(found - known)} of them new")
        releases.append(release)
        known |= found
    rows = textwrap.wrap(json.dumps(sorted(known))[1:-1], 118, break_on_hyphens=False)
    lines = "\n  ".join(rows)
    FILE.write_text(f'{{\n "releases": {json.dumps(releases)},\n "arguments": [\n  {lines}\n ]\n}}\n', encoding="utf-8")
    return 0


def arguments_of(folder: Path) -> Iterator[str]:
    """Yield the arguments of a release, some of them several times."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted((folder / PARSER).rglob("*.py"))]
    classes = _classes(folder)
    for tree in trees:
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            function = ast.unparse(call.func).rpartition(".")[2]
            if function == "add_argument":
                yield from _options(call)
            elif function == FACTORY and call.args:
                yield from _fields(classes, ast.unparse(call.args[0]))


def _options(node: ast.AST) -> Iterator[str]:
    """Yield the names of the options among the constants of a node."""
    for one in ast.walk(node):
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value.startswith("--"):
            name = one.value.lstrip("-").replace("-", "_")
            if name.isidentifier():
                yield name


def _classes(folder: Path) -> dict[str, list[ast.ClassDef]]:
    found: dict[str, list[ast.ClassDef]] = {}
    for path in sorted((folder / "megatron").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def _fields(classes: dict[str, list[ast.ClassDef]], name: str) -> Iterator[str]:
    """Yield the arguments that a class of a config becomes."""
    for node in classes.get(name.rpartition(".")[2], ()):
        for base in node.bases:
            yield from _fields(classes, ast.unparse(base))
        for one in node.body:
            if not (isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)):
                continue
            yield one.target.id
            if one.value is not None:
                yield from _options(one.value)
            if ast.unparse(one.annotation) == "bool" and "True" in ast.unparse(one.value or ast.Constant(False)):
                yield from (f"{prefix}_{one.target.id}" for prefix in ("no", "disable"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
