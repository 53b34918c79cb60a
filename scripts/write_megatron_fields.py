"""Write `bridge/target/megatron_fields.json`: the fields of Megatron's config classes, release by release.

    python scripts/write_megatron_fields.py 0.16.1=WHEEL 0.17.1=WHEEL ... main=FOLDER

Each argument names a release and where its sources are: a wheel, or a folder that holds ``megatron/core`` (an unpacked
wheel, a checkout). The sources are parsed, never imported. Without arguments the installed release is compared with the
file; a difference is an error. A field's type and default are those of the newest release that has it; `earlier` has
the other defaults. `precision` marks the fields whose name, type or docstring in any release speaks of a precision:
`bridge.sync.field_routes` has a home for each of them, or the reason why a recipe does not state it.
"""

from __future__ import annotations

import ast
import json
import operator
import re
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "bridge" / "target" / "megatron_fields.json"
CLASSES = {
    "model": (
        ("megatron/core/model_parallel_config.py", "ModelParallelConfig"),
        ("megatron/core/transformer/transformer_config.py", "TransformerConfig"),
        ("megatron/core/transformer/transformer_config.py", "MLATransformerConfig"),
    ),
    "optimizer": (("megatron/core/optimizer/optimizer_config.py", "OptimizerConfig"),),
    "ddp": (("megatron/core/distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
}
"""Role -> files and classes whose fields it has."""
PRECISION = re.compile(
    r"dtype|fp8|fp4|bf16|fp16|fp32|fp64|tf32|precision|autocast|amax|kitchen|invariant|transpose_cache|quant(?!il)",
    re.IGNORECASE,
)
"""Words of a field that may decide in what a number is held, computed, accumulated or sent; not quantiles."""
KINDS = {"bool": "bool", "int": "int", "float": "float", "str": "name", "torch.dtype": "dtype"}
NAMED = ("Literal", "Fp8Recipe", "Fp4Recipe")
"""Annotations whose values are names."""
OPERATORS: dict[type, Any] = {ast.Pow: operator.pow, ast.Mult: operator.mul, ast.Div: operator.truediv}
FACTORIES: dict[str, Any] = {"list": [], "tuple": [], "dict": {}}
DTYPES = {"torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16"}


Field = dict[str, Any]
"""`kind`, `default` and, where the field speaks of a precision, `precision`; in the file also `in` and `earlier`."""


def read(place: str, file: str) -> str:
    """Return a source file of a wheel or a folder."""
    if place.endswith(".whl"):
        with zipfile.ZipFile(place) as wheel:
            return wheel.read(file).decode()
    return (Path(place) / file).read_text(encoding="utf-8")


def fields_of(place: str) -> dict[str, dict[str, Field]]:
    """Return role -> name -> field of a release, from its sources at a place."""
    fields: dict[str, dict[str, Field]] = {}
    for role, classes in CLASSES.items():
        fields[role] = {}
        for file, name in classes:
            definition = _class(ast.parse(read(place, file)), name)
            for field_name, field in _fields_of_class(definition):
                fields[role].setdefault(field_name, field)
    return fields


def _fields_of_class(definition: ast.ClassDef) -> Iterator[tuple[str, Field]]:
    """Yield the public fields of a dataclass: name, and kind, default and mark."""
    body = definition.body
    for statement, below in zip(body, [*body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name = statement.target.id
        if name.startswith("_"):
            continue
        field: Field = {"kind": _kind(statement.annotation), "default": _default(statement.value)}
        if PRECISION.search(f"{name} {ast.unparse(statement.annotation)} {_docstring(below)}"):
            field["precision"] = True
        yield name, field


def _docstring(below: ast.stmt | None) -> str:
    """Return the string below a field, an empty one where another statement follows."""
    if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
        return str(below.value.value)
    return ""


def _class(module: ast.Module, name: str) -> ast.ClassDef:
    """Return the definition of a class of a module.

    Raises:
        LookupError: The module has no such class.
    """
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise LookupError(f"no class {name}")


def _kind(annotation: ast.expr) -> str:
    """Return bool, int, float, name, dtype or any; `X | None` has the kind of X."""
    if isinstance(annotation, ast.BinOp):
        members = [side for side in (annotation.left, annotation.right) if ast.unparse(side) != "None"]
        if len(members) == 1:
            return _kind(members[0])
        return "any"
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return _kind(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.Subscript):
        return _kind_of_generic(annotation)
    text = ast.unparse(annotation)
    if text in NAMED:
        return "name"
    return KINDS.get(text, "any")


def _kind_of_generic(annotation: ast.Subscript) -> str:
    """Return the kind of `Optional[X]`, `Literal[...]` and other types with arguments."""
    name = ast.unparse(annotation.value).rpartition(".")[2]
    if name == "Optional":
        return _kind(annotation.slice)
    if name not in NAMED:
        return "any"
    for node in ast.walk(annotation.slice):
        if isinstance(node, ast.Constant) and not isinstance(node.value, str):
            return "any"
    return "name"


def _default(value: ast.expr | None) -> Any:
    """Return a default as plain data, None for a default that is computed and for a required field."""
    if value is None:
        return None
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "float":  # float("inf")
        return float(ast.literal_eval(value.args[0]))
    if isinstance(value, ast.Call):  # field(default=..., default_factory=...)
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default_factory" in keywords:
            return FACTORIES.get(ast.unparse(keywords["default_factory"]))
        return _default(keywords.get("default"))
    text = ast.unparse(value)
    if text in DTYPES:
        return DTYPES[text]
    if isinstance(value, ast.Attribute) and text.partition(".")[0] in NAMED:
        return value.attr
    if isinstance(value, ast.BinOp):  # 2**32, 1024 * 1024
        return OPERATORS[type(value.op)](_default(value.left), _default(value.right))
    try:
        plain = ast.literal_eval(text)
    except ValueError:
        return None
    if isinstance(plain, tuple):
        return list(plain)
    return plain


def merged(releases: dict[str, dict[str, dict[str, Field]]]) -> dict[str, dict[str, Field]]:
    """Return role -> field -> its row, of the fields of all releases, oldest release first."""
    fields: dict[str, dict[str, Field]] = {}
    for role in CLASSES:
        names: set[str] = set()
        for roles in releases.values():
            names.update(roles[role])
        fields[role] = {}
        for name in sorted(names):
            by_release = {}
            for release, roles in releases.items():
                if name in roles[role]:
                    by_release[release] = roles[role][name]
            fields[role][name] = _row(by_release, is_in_all=len(by_release) == len(releases))
    return fields


def _row(by_release: dict[str, Field], *, is_in_all: bool) -> Field:
    """Return the row of a field: kind and default in its newest release, and how other releases differ."""
    newest = list(by_release.values())[-1]
    row = dict(newest)
    earlier = {}
    for release, field in by_release.items():
        if "precision" in field:
            row["precision"] = True
        if field["default"] != newest["default"]:
            earlier[release] = field["default"]
    if not is_in_all:
        row["in"] = list(by_release)
    if earlier:
        row["earlier"] = earlier
    return row


def differing_fields() -> list[str]:
    """Return the fields of the installed release that the file does not have, or does not have in that release."""
    package = distribution("megatron-core")
    written = json.loads(FILE.read_text(encoding="utf-8"))["fields"]
    differing = []
    for role, fields in fields_of(str(package.locate_file(""))).items():
        for name, field in fields.items():
            row = written[role].get(name)
            if row is None or package.version not in row.get("in", [package.version]) or field.keys() - row.keys():
                differing.append(f"{role}.{name}")
    return differing


def as_json(releases: list[str], fields: dict[str, dict[str, Field]]) -> str:
    """Return the content of the file, a line per field."""
    roles = []
    for role, rows in fields.items():
        lines = []
        for name, row in rows.items():
            lines.append(f"   {json.dumps(name)}: {json.dumps(row)}")
        joined = ",\n".join(lines)
        roles.append(f"  {json.dumps(role)}: {{\n{joined}\n  }}")
    body = ",\n".join(roles)
    return f'{{\n "releases": {json.dumps(releases)},\n "fields": {{\n{body}\n }}\n}}\n'


def main(words: list[str]) -> int:
    """Write the file, or compare it with the installed release; returns the exit code."""
    if not words:
        differing = differing_fields()
        if not differing:
            print("the installed release is as the file says")
            return 0
        print(*differing, sep="\n")
        return 1
    releases = {}
    for word in words:
        release, place = word.split("=", 1)
        releases[release] = fields_of(place)
    fields = merged(releases)
    FILE.write_text(as_json(list(releases), fields), "utf-8")
    print(f"{FILE.name}: {sum(map(len, fields.values()))} fields of {', '.join(releases)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
