"""`refuse_without_sizes`: the refusal of a file that does not state the sizes of its model.

"train.sh: does not state model.num_layers, or only when it runs. Add model.num_layers=VALUE."
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.errors import RunConfigError
from bridge.preflight.file_reading import MEGATRON_LM, FileReading

REQUIRED_SIZES = ("num_layers", "hidden_size", "num_attention_heads")
"""Sizes of a model without which nothing is known of it."""


def refuse_without_sizes(reading: FileReading, model: Mapping[str, Any], path: str) -> None:
    """Refuse a model of another framework's file whose sizes are not stated.

    Args:
        reading: The file as it was read.
        model: The section of the model, with the overrides.
        path: The name of the file in messages.

    Raises:
        RunConfigError: A size is not stated, or the layers are not those that the file describes.
    """
    if reading.other_layers is not None:
        raise RunConfigError(str(reading.no_plan_reason))
    absent = [f"model.{name}" for name in REQUIRED_SIZES if model.get(name) is None]
    if not absent:
        return
    names = ", ".join(absent)
    sizes = " ".join(f"{name}=VALUE" for name in absent)
    decider = reading.opened.get(f"model.{REQUIRED_SIZES[0]}")
    if reading.settings_of == MEGATRON_LM:
        raise RunConfigError(f"{path}: does not state {names}, or only when it runs. Add {sizes}.")
    if decider is not None:
        remedy = f"Add {sizes}."
        if reading.not_followed is not None:
            remedy = f"{reading.not_followed} {remedy}"
        elif reading.is_of_checkpoint:
            remedy = f"Add --context checkpoint=FOLDER, which has its config.json; or {sizes}."
        raise RunConfigError(f"{path}: does not state {names}, which {decider} decides. {remedy}")
