"""The JSON Schema of the YAML that is read here: of a recipe, and of a run's file.

Editors complete and check a YAML file by it. It is made of the tables of fields, and takes every
value that they take: a switch as ``true`` or ``"yes"``, a dtype in any spelling, and an
interpolation of OmegaConf in the place of any value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from bridge.precision.coercion import DTYPE_SPELLINGS, FALSE_WORDS, TRUE_WORDS
from bridge.precision.config import FIELDS
from bridge.precision.field_docs import FieldDoc, read_field_docs
from bridge.precision.fields import StatedField
from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES
from bridge.read.run_keys import (
    OWNER_SECTIONS,
    PRECISION_KEY,
    RECIPE_NAME_KEY,
    RECIPES_KEY,
    SECTION_CLASSES,
)
from bridge.registry.config import MixedPrecisionConfig
from bridge.target.fields import OWNER_FIELDS

Schema = dict[str, Any]

DIALECT = "http://json-schema.org/draft-07/schema#"
"""The one that yaml-language-server knows."""
INTERPOLATION = r"\$\{"
"""In a text that OmegaConf replaces by a value."""
DTYPE_EXAMPLES = ("bf16", "fp16", "fp32")
NAME_EXAMPLES = {"fp8_recipe": tuple(FP8_SCHEMES), "fp4_recipe": tuple(FP4_SCHEMES)}
"""Field with the name of a scaling scheme -> the known ones."""


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


def _build_precision_schema(extra: Schema) -> Schema:
    """Return the schema of a mapping of a precision's fields."""
    docs = read_field_docs(MixedPrecisionConfig)
    properties = {}
    for name, field in FIELDS.items():
        properties[name] = _add_description(_build_field_schema(field), docs[name])
    properties.update(extra)
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _build_section_schema(name: str) -> Schema:
    """Return the schema of a section: the known fields by their types.

    A model's provider may have more.
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
    return {
        "description": "The configs that this one is composed of, in Hydra's words.",
        "type": "array",
    }


def _build_typed_schema(description: str, *types: str) -> Schema:
    """Return the schema of a value of one of some types, with its description."""
    return {"description": description, "type": list(types)}


def _add_description(schema: Schema, doc: FieldDoc | None) -> Schema:
    """Return a schema with the sentence below its field."""
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
    """Return the schema of the values of a kind; null is no value, or takes a statement back."""
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
    """Return the schema of a dtype, which may have further spellings in one field."""
    text = _build_text_schema((*DTYPE_SPELLINGS, *further), before=r"(?:torch\.)?")
    return {"anyOf": [{"type": "null"}, text], "examples": list(DTYPE_EXAMPLES)}


def _build_any_schema() -> Schema:
    """Return the schema of any value."""
    return {}


def _build_text_schema(words: Iterable[str], before: str = "") -> Schema:
    """Return the schema of some words in any case, or of an interpolation.

    The dialect has no flag for the case.
    """
    spellings = []
    for word in sorted(words):
        spelling = ""
        for letter in word:
            if letter.isalpha():
                spelling += f"[{letter.upper()}{letter.lower()}]"
            else:
                spelling += letter
        spellings.append(spelling)
    return {
        "type": "string",
        "pattern": rf"^\s*{before}(?:{'|'.join(spellings)})\s*$|{INTERPOLATION}",
    }


SCHEMAS: Mapping[str, Any] = {"recipe": build_recipe_schema, "run": build_run_schema}
"""Kind of a YAML file -> the function that returns its schema."""
