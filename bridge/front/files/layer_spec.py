"""`unplanned_spec`: fields of a saved config that have another module build the layers of its model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

PLANNED = ("megatron.core.", "megatron.bridge.")
"""Beginnings of the import paths of functions that build the layers which their config describes."""
FIELD = re.compile(r"_spec\Z")
"""Fields of a model's own class that hold what builds the layers."""
OF_MODELOPT = "ModelOpt changes the layers as its configuration says, and they cannot be planned"
RESTORED = "model.restore_modelopt_state"
OF_KITCHEN = "Kitchen's layers compute as it says, and cannot be planned"
KITCHEN = ("use_kitchen", "use_kitchen_attention")


def unplanned_kitchen(sections: Mapping[str, Any]) -> str | None:
    """Return why a run with layers of the library Kitchen cannot be planned, as a sentence; None without them."""
    model = sections.get("model")
    for name in KITCHEN:
        if isinstance(model, Mapping) and model.get(name):
            return f"model.{name}: Kitchen computes its layers by a recipe of its own, and they cannot be planned."
    return None


def unplanned_spec(fields: Mapping[str, Any]) -> str | None:
    """Return why the layers of a saved config cannot be planned, as a sentence; None where they can.

    Args:
        fields: Dotted key of a field of the model's own class -> its value; a function is its import path.
    """
    for path, value in fields.items():
        if FIELD.search(path) and isinstance(value, str) and not value.startswith(PLANNED):
            return f"{path}: {value} builds the layers, and they cannot be planned."
        if path == RESTORED and value:
            return f"{path}: {OF_MODELOPT}."
    return None
