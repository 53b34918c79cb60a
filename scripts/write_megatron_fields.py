"""Write `bridge/target/megatron_fields.json`: the fields of Megatron's config classes, release by release.

    python scripts/write_megatron_fields.py 0.16.1=WHEEL 0.17.1=WHEEL ... main=FOLDER

Each argument names a release and where its sources are: a wheel, or a folder that holds ``megatron/core`` (an unpacked
wheel, a checkout). The sources are parsed, never imported. Without arguments the installed release is compared with the
file; a difference is an error. A field's type and default are those of the newest release that has it; `earlier` has
the other defaults. `precision` marks the fields whose name, type or docstring in any release speaks of a precision:
`bridge.sync.routes` has a home for each of them, or the reason why a recipe does not state it.
"""

from __future__ import annotations

import ast
import json
import operator
import re
import sys
import zipfile
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


def read(place: str, file: str) -> str:
    """Return a source file of a wheel or a folder."""
    if place.endswith(".whl"):
        with zipfile.ZipFile(place) as wheel:
            return wheel.read(file).decode()
    return (Path(place) / file).read_text(encoding="utf-8")


def fields_of(place: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return role -> field -> kind and default of one release."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for role, classes in CLASSES.items():
        found[role] = {}
        for file, name in classes:
            body = _class(ast.parse(read(place, file)), name).body
            for statement, below in zip(body, [*body[1:], None], strict=True):
                if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                    continue
                if not statement.target.id.startswith("_"):
                    field = {"kind": _kind(statement.annotation), "default": _default(statement.value)}
                    speaks = f"{statement.target.id} {ast.unparse(statement.annotation)} {_docstring(below)}"
                    field |= {"precision": True} if PRECISION.search(speaks) else {}
                    found[role].setdefault(statement.target.id, field)
    return found


def _docstring(below: ast.stmt | None) -> str:
    """Return the text of a string that stands below a field, or nothing."""
    is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    return str(below.value.value) if is_text else ""  # type: ignore[union-attr]


def _class(module: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name)


def _kind(annotation: ast.expr) -> str:
    """Return bool, int, float, name, dtype or any; None beside a type changes nothing."""
    if isinstance(annotation, ast.BinOp):
        members = [one for one in (annotation.left, annotation.right) if ast.unparse(one) != "None"]
        return _kind(members[0]) if len(members) == 1 else "any"
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return _kind(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.Subscript):
        name = ast.unparse(annotation.value).rpartition(".")[2]
        if name == "Optional":
            return _kind(annotation.slice)
        strings = [node for node in ast.walk(annotation.slice) if isinstance(node, ast.Constant)]
        return "name" if name in NAMED and all(isinstance(one.value, str) for one in strings) else "any"
    text = ast.unparse(annotation)
    return KINDS.get(text, "name" if text in NAMED else "any")


def _default(value: ast.expr | None) -> Any:
    """Return a default as plain data; None for what is computed or required."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "float":  # float("inf")
        return float(ast.literal_eval(value.args[0]))
    if isinstance(value, ast.Call):
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default_factory" in given:
            return FACTORIES.get(ast.unparse(given["default_factory"]))
        return _default(given.get("default"))
    text = ast.unparse(value) if value is not None else "None"
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
    return list(plain) if isinstance(plain, tuple) else plain


def merged(releases: dict[str, dict[str, dict[str, dict[str, Any]]]]) -> dict[str, Any]:
    """Return the content of the file: the releases in order, and each field with the releases that have it."""
    fields: dict[str, dict[str, Any]] = {}
    for role in CLASSES:
        names = sorted({name for roles in releases.values() for name in roles[role]})
        fields[role] = {name: _row({one: roles[role].get(name) for one, roles in releases.items()}) for name in names}
    return {"releases": list(releases), "fields": fields}


def _row(by_release: dict[str, dict[str, Any] | None]) -> dict[str, Any]:
    """Return one field: the newest release's type and default, and the releases that differ."""
    held = {release: row for release, row in by_release.items() if row is not None}
    newest = list(held.values())[-1]
    mark = {"precision": True} if any("precision" in row for row in held.values()) else {}
    earlier = {release: row["default"] for release, row in held.items() if row["default"] != newest["default"]}
    where = {"in": list(held)} if len(held) < len(by_release) else {}
    return newest | mark | where | ({"earlier": earlier} if earlier else {})


def main(words: list[str]) -> int:
    """Write the file, or compare it with what is installed; returns the exit code."""
    if not words:
        package = distribution("megatron-core")
        ours = json.loads(FILE.read_text(encoding="utf-8"))["fields"]
        differing = [
            f"{role}.{name}"
            for role, rows in fields_of(str(package.locate_file(""))).items()
            for name, row in rows.items()
            if package.version not in ours[role].get(name, {}).get("in", [package.version])
            or name not in ours[role]
            or row.keys() - ours[role][name].keys()
        ]
        print(*differing or ["the installed release is as the file says"], sep="\n")
        return 1 if differing else 0
    places = dict(word.split("=", 1) for word in words)
    content = merged({release: fields_of(place) for release, place in places.items()})
    rows = {
        role: "{\n" + ",\n".join(f"   {json.dumps(name)}: {json.dumps(row)}" for name, row in fields.items()) + "\n  }"
        for role, fields in content["fields"].items()
    }
    body = ",\n".join(f"  {json.dumps(role)}: {text}" for role, text in rows.items())
    FILE.write_text(f'{{\n "releases": {json.dumps(content["releases"])},\n "fields": {{\n{body}\n }}\n}}\n', "utf-8")
    print(f"{FILE.name}: {sum(map(len, content['fields'].values()))} fields of {', '.join(places)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
