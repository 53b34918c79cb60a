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
DIFFUSION, GPT = ".diffusion.", "GPTModelProvider"
"""Package of the diffusion models, and the class that those of text extend."""


class Sources:
    """The classes of some folders of Python sources: dotted name -> its own fields and its bases."""

    def __init__(self, folders: list[Path]) -> None:
        self.fields: dict[str, list[str]] = {}
        self.bases: dict[str, list[str]] = {}
        for folder in folders:
            for path in sorted(folder.rglob("*.py")):
                self._read(path, ".".join(path.relative_to(folder).with_suffix("").parts))

    def _read(self, path: Path, module: str) -> None:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        known = {one.asname or one.name: f"{node.module}.{one.name}" for node in nodes for one in node.names}
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        known |= {node.name: f"{module}.{node.name}" for node in classes}
        for node in classes:
            bases = [ast.unparse(base).partition("[")[0] for base in node.bases]
            self.bases[known[node.name]] = [known.get(base, base) for base in bases]
            self.fields[known[node.name]] = [
                one.target.id
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
                if not one.target.id.startswith("_") and "ClassVar" not in ast.unparse(one.annotation)
            ]

    def lineage(self, name: str) -> list[str]:
        """Return a class and all that it extends."""
        found = [name]
        for base in self.bases.get(name, []):
            found += [one for one in self.lineage(base) if one not in found]
        return found

    def is_config(self, name: str) -> bool:
        """Return whether a class is a config of a model, an optimizer or DDP."""
        lineage = self.lineage(name)
        nests = any(NESTED in self.fields.get(one, ()) for one in lineage)
        return nests or any(one.startswith("megatron.core.") and one.rpartition(".")[2] in CORE for one in lineage)


def table(sources: Sources, own: Sources, known: set[str]) -> dict[str, list[str]]:
    """Return each config class of a framework's own sources -> its fields that Megatron Core does not have."""
    return {
        name: sorted({field for one in sources.lineage(name) for field in sources.fields.get(one, ())} - known)
        for name in sorted(own.fields)
        if sources.is_config(name)
    }


def main(words: list[str]) -> int:
    """Write the file; returns the exit code."""
    if not words:
        print(__doc__)
        return 2
    core = json.loads((ROOT / "target" / "megatron_fields.json").read_text(encoding="utf-8"))["fields"]
    known = {name for fields in core.values() for name in fields}
    content: dict[str, Any] = {}
    for word in words:
        framework, release, folders = word.split("=", 2)
        places = [Path(folder) for folder in folders.split(",")]
        sources = Sources(places)
        classes = table(sources, Sources(places[:1]), known)
        by_fields: dict[tuple[str, ...], list[str]] = {}
        for name, fields in classes.items():
            by_fields.setdefault(tuple(fields), []).append(name)
        rows = [{"classes": names, "fields": list(fields)} for fields, names in by_fields.items()]
        lineages = {name: [one.rpartition(".")[2] for one in sources.lineage(name)] for name in classes}
        textless = [name for name, lineage in lineages.items() if DIFFUSION in name and GPT not in lineage]
        content[framework] = {"release": release, "without_text": textless, "configs": rows}
        print(f"{framework} {release}: {len(classes)} classes, {len(rows)} sets of fields")
    FILE.write_text(_lines(content), encoding="utf-8")
    return 0


def _lines(content: dict[str, Any]) -> str:
    """Return the content as JSON with a line for each set of fields."""
    parts = []
    for framework, table_ in content.items():
        rows = ",\n   ".join(json.dumps(row) for row in table_["configs"])
        head = "".join(f"  {json.dumps(key)}: {json.dumps(table_[key])},\n" for key in ("release", "without_text"))
        parts.append(f' {json.dumps(framework)}: {{\n{head}  "configs": [\n   {rows}\n  ]\n }}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
