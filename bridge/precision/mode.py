"""The mode and the scaling scheme of a precision, and the words that name it."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from bridge.precision.config import MODE_SWITCHES, PrecisionConfig
from bridge.precision.module_row import module_rows
from bridge.precision.statements import field_value, recipe_name, stated_over_recipe, stated_values

ROWS_IN_A_LABEL = 4


def mode_of(precision: PrecisionConfig) -> str:
    """Return fp32, fp16 or bf16: what the weights train in.

    No switch at all means fp32, as it does to Megatron.
    """
    if precision.bf16:
        return "bf16"
    if precision.fp16:
        return "fp16"
    return "fp32"


def scheme_of(precision: PrecisionConfig) -> str | None:
    """Return the name of the low-precision scaling scheme that is on, or None."""
    if precision.fp8:
        return precision.fp8_recipe
    if precision.fp4:
        return precision.fp4_recipe
    return None


def low_format_of(precision: PrecisionConfig) -> str | None:
    """Return the FP8 or FP4 format that is on, or None."""
    return precision.fp8 or precision.fp4


def label_of(precision: PrecisionConfig) -> str:
    """Return the recipe's name and the fields stated over it.

    An example is "bf16_mixed, grad_reduce_in_fp32=False".
    """
    values = stated_values(precision)
    recipe = recipe_name(precision)
    fields = stated_over_recipe(precision)
    if recipe is None:  # without a recipe a switch that is off changes nothing
        fields = tuple(name for name in fields if name not in MODE_SWITCHES or values[name])
    parts = [recipe, fields_in_words(precision, fields)]
    return ", ".join(filter(None, parts)) or "fp32"


def fields_in_words(precision: PrecisionConfig, fields: Collection[str]) -> str:
    """Return some fields as "field=value", the rows of `modules` in short."""
    stated = stated_values(precision)
    parts = []
    for name in fields:
        value = stated.get(name, field_value(precision, name))
        if name == "modules":
            value = _rows_in_words(field_value(precision, name))
        parts.append(f"{name}={value}")
    return ", ".join(parts)


def _rows_in_words(plain: Sequence[Mapping[str, Any]] | None) -> str:
    rows = module_rows(plain)
    words = []
    for row in rows[:ROWS_IN_A_LABEL]:
        words.append(f"{row} {row.precision.label}")
    if len(rows) > ROWS_IN_A_LABEL:
        words.append(f"and {len(rows) - ROWS_IN_A_LABEL} more")
    return f"[{', '.join(words)}]"
