"""The JSON Schemas of a recipe in YAML, and of the file of a run.

Editors complete and check YAML files by these schemas. They are built from the tables of fields. They
accept every value that the fields accept: a switch as ``true`` or ``"yes"``, a dtype in any spelling,
and an interpolation of OmegaConf instead of any value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bridge.precision.coercion import DTYPE_SPELLINGS, FALSE_WORDS, TRUE_WORDS
from bridge.precision.field_docstrings import FieldDoc, read_field_docs
from bridge.precision.precision_config import FIELDS
from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES
from bridge.precision.stated_field import StatedField
from bridge.read.run_keys import (
    OWNER_SECTIONS,
    PRECISION_KEY,
    RECIPE_NAME_KEY,
    RECIPES_KEY,
    SECTION_CLASSES,
)
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.target.fields import OWNER_FIELDS

Schema = dict[str, Any]

DIALECT = "http://json-schema.org/draft-07/schema#"
"""The version of JSON Schema that yaml-language-server supports."""
INTERPOLATION = r"\$\{"
"""Pattern of a text that OmegaConf replaces by a value."""
DTYPE_EXAMPLES = ("bf16", "fp16", "fp32")
NAME_EXAMPLES = {"fp8_recipe": tuple(FP8_SCHEMES), "fp4_recipe": tuple(FP4_SCHEMES)}
"""Field that names a scaling scheme -> the known schemes."""


def build_recipe_schema() -> Schema:
    """Return the schema of a recipe in YAML, a file of the group `mixed_precision`."""
    return {
        "$schema": DIALECT,
        "title": "A mixed-precision recipe",
        **_build_precision_schema(extra={"defaults": _build_defaults_schema()}),
    }


def build_run_schema() -> Schema:
    """Return the schema of a file of sections that describes a run."""
    sections: Schema = {
        name: _build_section_schema(name) for name in (*OWNER_SECTIONS, *SECTION_CLASSES)
    }
    precision = {
        "description": "The precision: a recipe's name, or its fields.",
        "anyOf": [
            {"type": ["string", "null"]},
            _build_precision_schema(extra={RECIPE_NAME_KEY: {"type": "string"}}),
        ],
    }
    others: Schema = {
        "defaults": _build_defaults_schema(),
        "target": _build_typed_schema(
            "The machines of the run: h100x64,te2.9,cuda12.9.", "string", "array", "null"
        ),
        "silence": _build_typed_schema(
            "Id of a rule -> the reason for which it is silenced.", "object", "null"
        ),
        "precision_backend": _build_typed_schema(
            "What runs FP8 and FP4 matrix multiplications.", "string", "null"
        ),
        "precision_schedule": _build_typed_schema(
            "The precisions of a run in phases.", "array", "object", "null"
        ),
        RECIPES_KEY: _build_typed_schema(
            "Modules or files of recipes, which are Python and run with --trust.",
            "string",
            "array",
            "null",
        ),
    }
    return {
        "$schema": DIALECT,
        "title": "A run, in sections",
        "type": "object",
        "properties": {PRECISION_KEY: precision, **sections, **others},
        "additionalProperties": False,
    }


def _build_precision_schema(extra: Mapping[str, Schema]) -> Schema:
    """Return the schema of a mapping with the fields of a precision, and further keys."""
    docs = read_field_docs(MixedPrecisionConfig)
    properties = {}
    for name, field in FIELDS.items():
        properties[name] = _add_description(_build_field_schema(field), docs[name])
    properties.update(extra)
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _build_section_schema(name: str) -> Schema:
    """Return the schema of a section with its known fields.

    Further fields are accepted, because a model provider may have more fields.
    """
    properties = {}
    for field_name, row in OWNER_FIELDS.get(name, {}).items():
        properties[field_name] = _build_kind_schema(row.kind)
    if name in SECTION_CLASSES:
        docs = read_field_docs(SECTION_CLASSES[name])
        for field in dataclasses.fields(SECTION_CLASSES[name]):
            properties[field.name] = _add_description(_build_any_schema(), docs.get(field.name))
    return {"type": ["object", "null"], "properties": properties}


def _build_defaults_schema() -> Schema:
    """Return the schema of Hydra's defaults list."""
    return {
        "description": "The configs that this one is composed of, in Hydra's words.",
        "type": "array",
    }


def _build_typed_schema(description: str, *types: str) -> Schema:
    """Return the schema of a value that may have one of several types."""
    return {"description": description, "type": list(types)}


def _add_description(schema: Schema, doc: FieldDoc | None) -> Schema:
    """Return a schema with the documentation of its field, if the field has documentation."""
    if doc is None:
        return schema
    return {"description": doc.text, **schema}


def _build_field_schema(field: StatedField) -> Schema:
    """Return the schema of a field of the precision."""
    schema = _build_kind_schema(field.kind)
    if field.kind == "dtype":
        further = [spelling for spelling, _ in field.spellings]
        schema = _build_dtype_schema(further)
    examples = field.choices or field.examples or NAME_EXAMPLES.get(field.name, ())
    if examples:
        schema["examples"] = list(examples)
    return schema


def _build_kind_schema(kind: str) -> Schema:
    """Return the schema of the values of a kind. Null means no value, or removes a statement."""
    if kind == "bool":
        return {
            "anyOf": [
                {"type": ["boolean", "null"]},
                _build_text_schema((*TRUE_WORDS, *FALSE_WORDS)),
            ]
        }
    if kind in ("int", "float"):
        text = {"type": "string", "pattern": rf"[0-9]|[Ii][Nn][Ff]|{INTERPOLATION}"}
        return {"anyOf": [{"type": ["number", "null"]}, text]}
    if kind == "dtype":
        return _build_dtype_schema(())
    if kind == "rows":
        row = {
            "type": "object",
            "description": "select, and precision or a scheme: docs/howto/per-module.md",
        }
        return {"anyOf": [{"type": "array", "items": row}, {"type": ["null", "string"]}]}
    if kind in ("name", "format"):
        return {"type": ["string", "boolean", "null"]}
    return _build_any_schema()


def _build_dtype_schema(further: Iterable[str]) -> Schema:
    """Return the schema of a dtype, with the further spellings of one field."""
    text = _build_text_schema((*DTYPE_SPELLINGS, *further), prefix=r"(?:torch\.)?")
    return {"anyOf": [{"type": "null"}, text], "examples": list(DTYPE_EXAMPLES)}


def _build_any_schema() -> Schema:
    """Return the schema of any value."""
    return {}


def _build_text_schema(words: Iterable[str], prefix: str = "") -> Schema:
    """Return the schema of some names in upper or lower case, or of an interpolation.

    Args:
        words: The names.
        prefix: A pattern of the text that may precede a name.
    """
    spellings = []
    for word in sorted(words):
        # Patterns of JSON Schema have no flag that ignores the case.
        pattern = ""
        for letter in word:
            if letter.isalpha():
                pattern += f"[{letter.upper()}{letter.lower()}]"
            else:
                pattern += letter
        spellings.append(pattern)
    return {
        "type": "string",
        "pattern": rf"^\s*{prefix}(?:{'|'.join(spellings)})\s*$|{INTERPOLATION}",
    }


SCHEMAS: Mapping[str, Callable[[], Schema]] = {
    "recipe": build_recipe_schema,
    "run": build_run_schema,
}
"""Kind of YAML file -> the function that builds its schema."""
