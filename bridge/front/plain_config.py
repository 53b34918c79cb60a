"""A `ConfigContainer` as plain data, for `config.yaml` and `origins.json` of a run folder."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any

from bridge.precision.coercion import is_torch_dtype, parse_dtype
from bridge.precision.stated_field import get_field_default
from bridge.precision.statements import get_recipe_name
from bridge.read.run_keys import OWNER_SECTIONS, RECIPE_NAME_KEY, SECTION_CLASSES
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.training.config import ConfigContainer

FIELDS_OF_OTHER_FILES = ("precision_choice", "set_by")
"""Fields that findings.json and origins.json have."""


def container_to_dict(config: ConfigContainer) -> dict[str, Any]:
    """Return every field of every section as plain data.

    A dtype becomes its token. A function or an enum becomes its name.
    """
    sections = {}
    for field in dataclasses.fields(config):
        if field.name not in FIELDS_OF_OTHER_FILES:
            sections[field.name] = getattr(config, field.name)
    precision = sections.pop("mixed_precision")
    if isinstance(precision, MixedPrecisionConfig):
        precision = _precision_to_dict(precision)
    schedule = sections["precision_schedule"]
    sections["precision_schedule"] = getattr(schedule, "rows", schedule)
    plain = {"mixed_precision": precision}
    for name, section in sections.items():
        plain[name] = value_to_plain(section)
    return plain


def _precision_to_dict(precision: MixedPrecisionConfig) -> dict[str, Any]:
    """Return the stated fields of a precision, with the name of its recipe before them."""
    fields = precision.to_dict()
    name = get_recipe_name(precision)
    if name:
        return {RECIPE_NAME_KEY: name, **fields}
    return fields


def origins_to_dict(config: ConfigContainer) -> dict[str, Any]:
    """Return the sources of each key that was set, and the defaults of changed fields.

    A field is changed if it was set, or has another value than its default.
    """
    defaults = {}
    for name in (*OWNER_SECTIONS, *SECTION_CLASSES):
        section = getattr(config, name)
        for field in dataclasses.fields(section):
            default = get_field_default(field)
            if default is dataclasses.MISSING:
                default = None
            default = value_to_plain(default)
            key = f"{name}.{field.name}"
            if key in config.set_by or default != value_to_plain(getattr(section, field.name)):
                defaults[key] = default
    return {"defaults": defaults, "set_by": value_to_plain(config.set_by)}


def value_to_plain(value: Any) -> Any:
    """Return a value of a config as plain data. A value of an unknown type becomes its repr."""
    if isinstance(value, enum.Enum):
        if isinstance(value, str):
            return value.value
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_torch_dtype(value):
        return parse_dtype(value)
    if isinstance(value, dict):
        return {str(key): value_to_plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [value_to_plain(inner) for inner in value]
    if dataclasses.is_dataclass(value):
        fields = {}
        for field in dataclasses.fields(value):
            if not field.name.startswith("_"):
                fields[field.name] = value_to_plain(getattr(value, field.name))
        return fields
    if isinstance(value, functools.partial):  # its repr has an address, which differs between runs
        arguments = list(map(repr, value.args))
        for name, argument in value.keywords.items():
            arguments.append(f"{name}={argument!r}")
        return f"{value_to_plain(value.func)}({', '.join(arguments)})"
    return getattr(value, "__name__", None) or repr(value)
