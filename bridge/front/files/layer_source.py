"""`unplanned_layers`: options that have another module build the layers of a run, whose plan nobody can know then.

Layers that Megatron Core builds itself are known, and stay planned: `SPECS` has the names of their specs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bridge.interop.megatron_lm.flags import TABLE

SPECS: Mapping[str, str] = TABLE.data["specs"]
"""Last word of `--spec`, of Megatron Core's own layers -> the implementation of the layers."""
CORE = "megatron.core.models."
PLANNED = ("megatron.core.", "megatron.bridge.")
"""Beginnings of the import paths of functions that build the layers which their config describes."""
BUILDER = re.compile(r"\Aspec\Z|(?:^|_)(?:layer_spec|model_provider(?:_path)?|model_builder)\Z")
"""Arguments that name what builds the model, or its layers."""
FIELD = re.compile(r"_spec\Z")
"""Fields of a model's own class that do."""
OWN_MODELS = frozenset({"gpt", "mamba", "hybrid"})
"""Values of `--model-provider` for models that are planned here."""
KITCHEN = ("kitchen_config_file", "kitchen_recipe_number")
WORD = re.compile(r"[^\s\[\]',\"]+")
SENTENCE = "--{name} {value}: the layers are built by that module and cannot be planned."
OF_KITCHEN = "--{name} {value}: Kitchen's layers compute as it says, and cannot be planned."


def unplanned_layers(arguments: Mapping[str, Any]) -> str | None:
    """Return why the layers of a run cannot be planned, as a sentence; None where they can.

    Args:
        arguments: Name of an argument -> its value, or the value as it is written where only the run decides it.
    """
    for name, value in arguments.items():
        words = WORD.findall(str(value))
        shown = {"name": name.replace("_", "-"), "value": " ".join(words)}
        if name in KITCHEN:
            return OF_KITCHEN.format(**shown)
        if BUILDER.search(name) and words and not is_known(words):
            return SENTENCE.format(**shown)
    return None


def unplanned_spec(fields: Mapping[str, Any]) -> str | None:
    """Return why the layers of a saved config cannot be planned, as a sentence; None where they can.

    Args:
        fields: Dotted key of a field of the model's own class -> its value; a function is its import path.
    """
    for path, value in fields.items():
        if FIELD.search(path) and isinstance(value, str) and not value.startswith(PLANNED):
            return f"{path}: {value} builds the layers, and they cannot be planned."
    return None


def is_known(words: list[str]) -> bool:
    """Return whether words name layers that Megatron Core builds, or one of its models."""
    if len(words) == 1 and words[0] in OWN_MODELS:
        return True
    of_core = len(words) == 1 or words[0].startswith(CORE)
    return of_core and words[-1].rpartition(".")[2] in SPECS


def implementation(arguments: Mapping[str, Any]) -> str | None:
    """Return the implementation of the layers that `--spec` chooses; None where it is not given."""
    words = WORD.findall(str(arguments.get("spec") or ""))
    if not words or not is_known(words):
        return None
    return SPECS.get(words[-1].rpartition(".")[2])
