"""`precision-bridge recipes A B`: the fields in which two recipes differ."""

from __future__ import annotations

from typing import Any

from bridge.cli.output import format_value, print_json
from bridge.cli.recipes.named_recipe import NamedRecipe
from bridge.precision.statements import get_recipe_name, is_stated
from bridge.registry.config import MixedPrecisionConfig


def print_difference(a: str, b: str, *, config_dir: str | None, as_json: bool) -> None:
    """Print one line per field in which two recipes differ, with the values of both.

    A value that a side does not state is marked as a default.
    """
    one = NamedRecipe.from_name(a, config_dir).config
    two = NamedRecipe.from_name(b, config_dir).config
    rows = list_field_differences(one, two)
    if as_json:
        print_json({"a": get_recipe_name(one), "b": get_recipe_name(two), "fields": rows})
        return
    if not rows:
        print(f"{get_recipe_name(one)} and {get_recipe_name(two)} say the same.")
        return
    print(f"  {'':<33} {get_recipe_name(one)} -> {get_recipe_name(two)}")
    for row in rows:
        print(f"  {row['field']:<33} {_format_side(row, 'a')} -> {_format_side(row, 'b')}")


def _format_side(row: dict[str, Any], side: str) -> str:
    """Return the value of a field in one of the two recipes, and whether it is a default."""
    text = format_value(row[side])
    if row[f"{side}_stated"]:
        return text
    return f"{text} (default)"


def list_field_differences(
    one: MixedPrecisionConfig, two: MixedPrecisionConfig
) -> list[dict[str, Any]]:
    """Return a row per field that differs: its values, and whether each side states it."""
    first, second = one.to_dict(full=True), two.to_dict(full=True)
    rows = []
    for name in first:
        stated = {"a_stated": is_stated(one, name), "b_stated": is_stated(two, name)}
        if first[name] != second[name] or stated["a_stated"] != stated["b_stated"]:
            rows.append({"field": name, "a": first[name], "b": second[name], **stated})
    return rows
