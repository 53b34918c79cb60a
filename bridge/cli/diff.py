"""`precision-bridge diff A B`: the fields in which two recipes differ."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from bridge.cli.named_recipe import add_config_dir, named_recipe

if TYPE_CHECKING:
    import argparse

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("diff", help="show the fields in which two recipes differ")
    parser.add_argument("a", help="recipe")
    parser.add_argument("b", help="recipe")
    add_config_dir(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> None:
    """Print one line per differing field: values, and whether each side states them."""
    one, two = (named_recipe(name, chosen.config_dir).config for name in (chosen.a, chosen.b))
    first, second = one.to_dict(full=True), two.to_dict(full=True)
    rows = [
        {
            "field": name,
            "a": first[name],
            "b": second[name],
            "a_stated": one.is_stated(name),
            "b_stated": two.is_stated(name),
        }
        for name in first
        if first[name] != second[name] or one.is_stated(name) != two.is_stated(name)
    ]
    if chosen.json:
        print(json.dumps({"a": one.recipe, "b": two.recipe, "fields": rows}, indent=2))
        return
    if not rows:
        print(f"{one.recipe} and {two.recipe} say the same.")
        return
    print(f"  {'':<33} {one.recipe} -> {two.recipe}")
    for row in rows:
        before = _shown(row["a"], stated=bool(row["a_stated"]))
        after = _shown(row["b"], stated=bool(row["b_stated"]))
        print(f"  {row['field']:<33} {before} -> {after}")


def _shown(value: object, *, stated: bool) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if stated else f"{text} (default)"
