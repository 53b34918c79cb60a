"""The mode and the scaling scheme of a precision, and its label in reports."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from bridge.precision.module_row import parse_module_rows
from bridge.precision.precision_config import MODE_SWITCHES, PrecisionConfig
from bridge.precision.statements import (
    get_field_value,
    get_recipe_name,
    get_stated_values,
    list_fields_over_recipe,
)

MODE_DTYPE_FIELDS = ("params_dtype", "pipeline_dtype", "autocast_dtype")
"""Fields whose dtype follows from the mode if they are not stated."""
FILLED_DTYPE_FIELDS = ("params_dtype", "pipeline_dtype")
"""The fields of `MODE_DTYPE_FIELDS` that are written for Megatron Bridge with the mode's dtype.

None would replace the dtype that the model has. Megatron computes `autocast_dtype` itself if it is
None.
"""
MAX_LABEL_ROWS = 4


def get_mode(precision: PrecisionConfig) -> str:
    """Return the mode: fp32, fp16 or bf16.

    No switch at all means fp32, as it does to Megatron.
    """
    if precision.bf16:
        return "bf16"
    if precision.fp16:
        return "fp16"
    return "fp32"


def get_scheme(precision: PrecisionConfig) -> str | None:
    """Return the name of the low-precision scaling scheme that is on, or None."""
    if precision.fp8:
        return precision.fp8_recipe
    if precision.fp4:
        return precision.fp4_recipe
    return None


def is_family_on(precision: PrecisionConfig, family: str | None) -> bool:
    """Return whether a family is on: fp8, fp4, or low for either of them. None: always."""
    if family == "fp8":
        return precision.fp8 is not None
    if family == "fp4":
        return precision.fp4 is not None
    if family == "low":
        return precision.fp8 is not None or precision.fp4 is not None
    return True


def get_low_precision_format(precision: PrecisionConfig) -> str | None:
    """Return the FP8 or FP4 format that is on, or None."""
    return precision.fp8 or precision.fp4


def format_label(precision: PrecisionConfig) -> str:
    """Return the recipe's name and the fields stated over it.

    An example is "bf16_mixed, grad_reduce_in_fp32=False".
    """
    values = get_stated_values(precision)
    recipe = get_recipe_name(precision)
    fields = list_fields_over_recipe(precision)
    if recipe is None:  # without a recipe a switch that is off changes nothing
        fields = tuple(name for name in fields if name not in MODE_SWITCHES or values[name])
    parts = [recipe, format_fields(precision, fields)]
    return ", ".join(filter(None, parts)) or "fp32"


def format_fields(precision: PrecisionConfig, fields: Collection[str]) -> str:
    """Return some fields as "field=value", the rows of `modules` in short."""
    stated = get_stated_values(precision)
    parts = []
    for name in fields:
        value = stated.get(name, get_field_value(precision, name))
        if name == "modules":
            value = _format_rows(get_field_value(precision, name))
        parts.append(f"{name}={value}")
    return ", ".join(parts)


def _format_rows(plain: Sequence[Mapping[str, Any]] | None) -> str:
    rows = parse_module_rows(plain)
    words = []
    for row in rows[:MAX_LABEL_ROWS]:
        words.append(f"{row} {row.precision.label}")
    if len(rows) > MAX_LABEL_ROWS:
        words.append(f"and {len(rows) - MAX_LABEL_ROWS} more")
    return f"[{', '.join(words)}]"
