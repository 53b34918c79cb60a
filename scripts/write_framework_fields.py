"""Write `bridge/read/framework_fields.json`: the fields that config classes of frameworks add to Megatron Core.

    python scripts/write_framework_fields.py "Megatron Bridge=0.7.0 of 2026-08-22=FOLDER,FOLDER" ...

Each argument names a framework, its release, and the folders of its sources, the second of them Megatron-LM's, whose
classes it extends. The sources are parsed, never imported. A class has the fields of its bases too; fields that a
config class of Megatron Core has stand in `bridge/target/megatron_fields.json` and are left out.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1] / "bridge"
FILE = ROOT / "read" / "framework_fields.json"
CORE = frozenset({"ModelParallelConfig", "TransformerConfig", "OptimizerConfig", "DistributedDataParallelConfig"})
"""Classes of Megatron Core; a class that extends none of them, and nests none, is no config of a model."""
NESTED = "transformer"
"""Field that holds a model's config within another."""
DIFFUSION = ".diffusion."
"""Package of the diffusion models."""
GPT = "GPTModelProvider"
"""Class that the configs of text models extend."""


class Sources:
    """The classes of some folders of Python sources, by dotted name."""

    def __init__(self, folders: list[Path]) -> None:
        self.fields: dict[str, list[str]] = {}
        """Class -> the fields that it declares itself."""
        self.bases: dict[str, list[str]] = {}
        """Class -> the classes that it extends directly."""
        for folder in folders:
            for path in sorted(folder.rglob("*.py")):
                self._read(path, ".".join(path.relative_to(folder).with_suffix("").parts))

    def _read(self, path: Path, module: str) -> None:
        """Add the classes of a file, with their bases by the names that the file imports them under."""
        tree = ast.parse(path.read_text(encoding="utf-8"))
        full_names: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full_names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for node in classes:
            full_names[node.name] = f"{module}.{node.name}"
        for node in classes:
            bases = []
            for base in node.bases:
                name = ast.unparse(base).partition("[")[0]
                bases.append(full_names.get(name, name))
            self.bases[full_names[node.name]] = bases
            self.fields[full_names[node.name]] = _public_fields(node)

    def lineage(self, name: str) -> list[str]:
        """Return a class and all that it extends."""
        classes = [name]
        for base in self.bases.get(name, []):
            for ancestor in self.lineage(base):
                if ancestor not in classes:
                    classes.append(ancestor)
        return classes

    def fields_with_bases(self, name: str) -> set[str]:
        """Return the fields of a class and of all that it extends."""
        fields: set[str] = set()
        for ancestor in self.lineage(name):
            fields.update(self.fields.get(ancestor, ()))
        return fields

    def is_config(self, name: str) -> bool:
        """Return whether a class is a config of a model, an optimizer or DDP."""
        if NESTED in self.fields_with_bases(name):
            return True
        of_core = [ancestor for ancestor in self.lineage(name) if ancestor.startswith("megatron.core.")]
        return not CORE.isdisjoint(map(_last, of_core))

    def is_without_text(self, name: str) -> bool:
        """Return whether a class is the config of a diffusion model, and not of one with a GPT inside."""
        return DIFFUSION in name and GPT not in map(_last, self.lineage(name))


def _public_fields(node: ast.ClassDef) -> list[str]:
    """Return the fields that a dataclass declares itself."""
    fields = []
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name = statement.target.id
        if not name.startswith("_") and "ClassVar" not in ast.unparse(statement.annotation):
            fields.append(name)
    return fields


def _last(name: str) -> str:
    """Return the last part of a dotted name."""
    return name.rpartition(".")[2]


def framework_table(release: str, folders: list[Path], known: set[str]) -> dict[str, Any]:
    """Return the fields of a framework's config classes that Megatron Core does not have.

    Classes with equal fields share a row. The first folder has the framework's sources.
    """
    sources = Sources(folders)
    without_text = []
    classes_of: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(Sources(folders[:1]).fields):
        if not sources.is_config(name):
            continue
        fields = sources.fields_with_bases(name) - known
        classes_of.setdefault(tuple(sorted(fields)), []).append(name)
        if sources.is_without_text(name):
            without_text.append(name)
    rows = []
    for fields, names in classes_of.items():
        rows.append({"classes": names, "fields": list(fields)})
    return {"release": release, "without_text": without_text, "configs": rows}


def fields_of_megatron_core() -> set[str]:
    """Return the names of the fields that config classes of Megatron Core have in any release."""
    core = json.loads((ROOT / "target" / "megatron_fields.json").read_text(encoding="utf-8"))["fields"]
    names: set[str] = set()
    for fields in core.values():
        names.update(fields)
    return names


def main(words: list[str]) -> int:
    """Write the file; returns the exit code."""
    if not words:
        print(__doc__)
        return 2
    known = fields_of_megatron_core()
    tables = {}
    for word in words:
        framework, release, folders = word.split("=", 2)
        table = framework_table(release, [Path(folder) for folder in folders.split(",")], known)
        tables[framework] = table
        classes = sum(len(row["classes"]) for row in table["configs"])
        print(f"{framework} {release}: {classes} classes, {len(table['configs'])} sets of fields")
    FILE.write_text(as_json(tables), encoding="utf-8")
    return 0


def as_json(tables: dict[str, dict[str, Any]]) -> str:
    """Return the content of the file, a line per set of fields."""
    parts = []
    for framework, table in tables.items():
        rows = ",\n   ".join(json.dumps(row) for row in table["configs"])
        lines = [
            f" {json.dumps(framework)}: {{",
            f'  "release": {json.dumps(table["release"])},',
            f'  "without_text": {json.dumps(table["without_text"])},',
            f'  "configs": [\n   {rows}\n  ]',
            " }",
        ]
        parts.append("\n".join(lines))
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
