"""`precision-bridge recipes A B`: the fields in which two recipes differ."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from bridge.cli.output import format_value, print_json
from bridge.cli.recipes.named_recipe import NamedRecipe
from bridge.precision.statements import get_recipe_name, is_stated
from bridge.registry.mixed_precision_config import MixedPrecisionConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldDifference:
    """A field in which two recipes differ. The fields are the keys of the JSON."""

    field: str
    a: object
    """The value in the first recipe, as plain data."""
    b: object
    """The value in the second recipe, as plain data."""
    a_stated: bool
    """Whether the first recipe states the field."""
    b_stated: bool
    """Whether the second recipe states the field."""


def print_difference(a: str, b: str, *, config_dir: str | None, as_json: bool) -> None:
    """Print a line for each field in which two recipes differ, with both values.

    A value that a recipe does not state is marked as a default.

    Args:
        a: The name of the first recipe.
        b: The name of the second recipe.
        config_dir: A folder with recipes of a team; None: no such folder.
        as_json: Whether to print JSON.
    """
    first = NamedRecipe.from_name(a, config_dir).config
    second = NamedRecipe.from_name(b, config_dir).config
    first_name, second_name = get_recipe_name(first), get_recipe_name(second)
    differences = list_field_differences(first, second)
    if as_json:
        rows = list(map(asdict, differences))
        print_json({"a": first_name, "b": second_name, "fields": rows})
        return
    if not differences:
        print(f"{first_name} and {second_name} say the same.")
        return
    print(f"  {'':<33} {first_name} -> {second_name}")
    for row in differences:
        before = _format_value(row.a, is_stated=row.a_stated)
        after = _format_value(row.b, is_stated=row.b_stated)
        print(f"  {row.field:<33} {before} -> {after}")


def _format_value(value: object, *, is_stated: bool) -> str:
    """Return a value, and whether it is a default."""
    value_text = format_value(value)
    if is_stated:
        return value_text
    return f"{value_text} (default)"


def list_field_differences(
    first: MixedPrecisionConfig, second: MixedPrecisionConfig
) -> list[FieldDifference]:
    """Return the fields whose values differ, or that only one of two recipes states."""
    first_values, second_values = first.to_dict(full=True), second.to_dict(full=True)
    differences = []
    for name, value in first_values.items():
        difference = FieldDifference(
            field=name,
            a=value,
            b=second_values[name],
            a_stated=is_stated(first, name),
            b_stated=is_stated(second, name),
        )
        if difference.a != difference.b or difference.a_stated != difference.b_stated:
            differences.append(difference)
    return differences
